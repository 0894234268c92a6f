"""Tables of calls that must raise, and how they are judged.

All calls of one table run in one subprocess, so that an abort of the process would show as an exit
code and not take the test run with it.
"""

import json
import subprocess
import sys

#: (the call, its exception or several with "|" between, what the text says, in this order)
Expected = tuple[str, str, list[str]]

PREAMBLE = """
import sys, torch
if sys.platform != "darwin":
    import torch_flash_mps.simulator
import torch_flash_mps
def t(*shape, dtype=torch.float32, device="mps"):
    return torch.zeros(shape, device=device).to(dtype)
"""

RUN = """
import json, sys
request = json.loads(sys.stdin.read())
raised = {}
for name, call in request["calls"].items():
    state = {}
    exec(request["preamble"], state)
    try:
        raised[name] = ["nothing", str(eval(call, state))]
    except Exception as error:
        raised[name] = [type(error).__name__, str(error)]
state["torch"].mps.synchronize()
print(json.dumps(raised))
"""


def run_calls(calls: dict[str, str], names: str = "") -> dict[str, list[str]]:
    """What each call raised, "nothing" if it did not, and the text of that or of its result.

    Args:
        calls: Python expressions by id. They know torch, torch_flash_mps, `t(*shape, dtype=,
            device=)`, a tensor of zeros on the mps device, and
        names: what these statements define, anew for each call.
    """
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps({"preamble": PREAMBLE + names, "calls": calls}),
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}:\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def check_raised(raised: list[str], expected: Expected) -> None:
    """Judges one result of `run_calls`."""
    _, expected_type, phrases = expected
    kind, text = raised
    assert kind in expected_type.split("|"), f"expected {expected_type}, got {kind}: {text}"
    rest = text
    for phrase in phrases:
        assert phrase in rest, f"expected {phrase!r} (in this order) in: {text}"
        rest = rest.split(phrase, 1)[1]
