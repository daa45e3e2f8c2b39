"""The function of docs/publishing.md by which a client waits for its own write."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.docs.page import sections

PAGE = Path(__file__).parents[2] / "docs/publishing.md"
CHECK = """
import { EventEmitter } from "node:events";
const subscription = new EventEmitter();
const arrived = ownWrites(subscription, 2);
const message = (txid) => subscription.emit("publication", { tags: { txid } });
const outcome = (promise) => promise.then(() => "arrived", (error) => error.message);

message("1");
console.log("before the answer:", await outcome(arrived("1")));

const both = [outcome(arrived("2")), outcome(arrived("2"))];
subscription.emit("publication", { data: "ephemeral, without tags" });
message("2");
console.log("after the answer:", ...await Promise.all(both));

console.log("never:", await outcome(arrived("3", 20)));

message("4");
message("5");
console.log("forgotten:", await outcome(arrived("1", 20)));
"""


def test_it_waits_for_the_transaction(require: Callable[[str], str]) -> None:
    (function,) = (
        example.code
        for section in sections(PAGE)
        for example in section.examples
        if example.language == "javascript"
    )
    done = subprocess.run(
        [require("node"), "--input-type=module", "--eval", function + CHECK],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "before the answer: arrived",
        "after the answer: arrived arrived",
        "never: transaction 3 has not arrived within 20 ms",
        "forgotten: transaction 1 has not arrived within 20 ms",
    ]
