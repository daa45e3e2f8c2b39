"""A live order board: an ordinary application on psycopg, watched through two gateways.

``python -m examples.orderboard`` starts everything and serves the page. The parts that an
application would have too:

- ``orders.sql``, ``orders.py``: the application's tables, and its transactions, which publish;
- ``board.py``: what a page loads before it subscribes, with the position to subscribe from;
- ``static/pane.js``: the browser's side of it, on the stock ``centrifuge`` SDK.

The rest is the show: ``writer.py`` commits orders all the time, ``truth.py`` tells the page what
Postgres committed so that the page can check what it was sent, ``controls.py`` breaks things,
and ``surroundings.py`` sees to it that these things are the demo's own.
"""
