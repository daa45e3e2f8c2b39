"""What can go wrong while a message is published, apart from errors of the connection.

Errors of the connection itself (a closed link, a serialisation failure, a missing privilege) are
the driver's and pass through unchanged.
"""


class PublishError(Exception):
    """Base of all errors of this package."""


class InvalidMessage(PublishError, ValueError):
    """The message cannot be published as it is; the text names the part and the remedy.

    Raised before anything is sent, so the transaction stays usable. Its subclass `Rejected` comes
    from the database.
    """


class Rejected(InvalidMessage):
    """The database refused the message: a name, a size or the JSON text is wrong.

    As after any SQL error the transaction is aborted: roll it back, or roll back to a savepoint.
    """

    def __init__(self, text: str, sqlstate: str) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate
        """The SQLSTATE of the database's error, five characters."""
