"""Xcode's tools and a connected phone as coremltools sees them: the commands that it calls, answering from a folder.

    python xcode.py FOLDER devicectl|xcodebuild ARGUMENT ...

FOLDER/phone.json says how the phone behaves, FOLDER/prediction.* what its model answers. `install` puts the commands on
a path of their own. All else between the command line and these commands is coremltools' own.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

COMMANDS = {"devicectl": "devicectl", "xcrun": "", "xcodebuild": "xcodebuild"}  # xcrun's arguments begin with a command
NANOSECONDS = {"MLModelService.Load": (250_000_000, 40_000_000, 40_000_000), "MLModelService.Prediction": (2_000_000,)}


def install(folder: Path, **behaviour: Any) -> Path:
    """The folder of commands for a phone that behaves so: see `main`."""
    (folder / "phone.json").write_text(json.dumps(behaviour))
    (commands := folder / "bin").mkdir()
    for name, first in COMMANDS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" {first} "$@"\n')
        (commands / name).chmod(0o755)
    return commands


def main(folder: Path, tool: str, *arguments: str) -> int:
    """One command. Behaviour: `devices` is what devicectl lists, `fails` maps a step to what it writes as it fails,
    `hangs` is a step that does not end, `refuses` a method of the app that answers with an error."""
    told = json.loads((folder / "phone.json").read_text())
    step = "build" if tool == "xcodebuild" else next(each for each in STEPS if each in " ".join(arguments))
    if step == told.get("hangs"):
        time.sleep(30)
    if step in told.get("fails", {}):
        print(told["fails"][step], file=sys.stderr)
        return 1
    result = STEPS[step](folder, told, arguments)
    if "-j" in arguments:
        Path(after("-j", arguments)).write_text(json.dumps({"result": result}))
    return 0


def after(option: str, arguments: tuple[str, ...]) -> str:
    return arguments[arguments.index(option) + 1]


def build(folder: Path, told: dict[str, Any], arguments: tuple[str, ...]) -> None:
    (folder / "xcodebuild.txt").write_text(" ".join(arguments))
    (root,) = (each.removeprefix("SYMROOT=") for each in arguments if each.startswith("SYMROOT="))
    (Path(root) / "modelrunner.app").mkdir()


def listed(folder: Path, told: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    return {
        "devices": [
            {
                "identifier": f"{udid}-i",
                "deviceProperties": {"name": name, "osVersionNumber": "18.0"},
                "hardwareProperties": {"deviceType": "iPhone", "udid": udid},
                "connectionProperties": {"tunnelState": state},
            }
            for udid, (name, state) in told["devices"].items()
        ]
    }


def installed(folder: Path, told: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    return {"installedApplications": [{"bundleID": "modelrunner", "databaseUUID": "1"}]}


def launched(folder: Path, told: dict[str, Any], arguments: tuple[str, ...]) -> None:
    time.sleep(30)  # until it is stopped


def sent(folder: Path, told: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, str]:
    source, destination = after("--source", arguments), after("--destination", arguments)
    if destination.endswith("message.json"):
        request = json.loads(Path(source).read_text())
        responses = folder / Path(destination.replace("requests/messages", "responses")).parent
        responses.mkdir(parents=True)
        answer(folder, told, request, responses)
    return {"source": source, "destination": destination}


def answer(folder: Path, told: dict[str, Any], request: dict[str, Any], responses: Path) -> None:
    """What the app on the phone answers to a message."""
    method, response = request["method"], {"id": request["id"]}
    with (folder / "methods.txt").open("a") as file:
        file.write(f"{method}\n")
    before = (folder / "methods.txt").read_text().splitlines().count(method) - 1
    result = {"modelID": request["params"]["modelID"]}
    if method in NANOSECONDS:
        result["duration"] = NANOSECONDS[method][before % len(NANOSECONDS[method])]
    if method == "MLModelService.Prediction":
        result["outputs"] = json.loads((folder / "prediction.json").read_text())
        response["resource"] = "prediction.bin"
        (responses / "prediction.bin").write_bytes((folder / "prediction.bin").read_bytes())
    response |= (
        {"error": {"code": -1, "message": "out of room"}} if method == told.get("refuses") else {"result": result}
    )
    (responses / "message.json").write_text(json.dumps(response))


def received(folder: Path, told: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, str]:
    source, destination = after("--source", arguments), after("--destination", arguments)
    Path(destination).write_bytes((folder / source).read_bytes())
    return {"source": source, "destination": destination}


STEPS = {
    "list devices": listed, "install app": installed, "process launch": launched, "copy to": sent,
    "copy from": received, "build": build,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
