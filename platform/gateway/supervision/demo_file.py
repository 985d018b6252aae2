"""``demo.json``: what a person needs to try the demo's tenants, in a file that only they can read.

Keys never pass over the terminal; those of an earlier start are kept while they still open the door.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from gateway.embedded.service import write_private
from gateway.supervision.platform_processes import PlatformOptions, manage
from gateway.supervision.supervisor import SupervisionError
from gateway.text import byte_text
from wire import vocabulary


def write_demo_file(options: PlatformOptions, environment: Mapping[str, str]) -> list[str]:
    """Make what is missing of the demo's tenants and write the file; returns the tenants whose key it cannot tell: a
    person has revoked or rotated it. Raises SupervisionError.
    """
    model = vocabulary.load(options.model).name if options.model is not None else byte_text().model
    path = options.data / "demo.json"
    spec = manage(options, environment, "seed", "seed_demo", "--json", f"--known={path}", f"--model={model}")
    done = subprocess.run(spec.command(), env=dict(spec.environment), capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise SupervisionError(f"The demo's tenants could not be made; its last words: {reason}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    write_private(path, json.dumps({"base_url": options.base_url, "model": model, **found}, indent=2) + "\n")
    return [slug for slug, key in found["keys"].items() if key is None]
