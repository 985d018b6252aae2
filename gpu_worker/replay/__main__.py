"""``python -m gpu_worker.replay LOG``: see ``command``."""

import sys

from gpu_worker.replay.command import main

sys.exit(main())
