"""What the launcher starts on each process: first make sure to die with it, only then load torch and work.

Loading takes seconds. A worker whose launcher is killed meanwhile would wait for a store that is gone, for ever.
"""

from __future__ import annotations

import sys

from .lifetime import die_with_parent, stop_without_launcher

if __name__ == "__main__":
    die_with_parent()
    from .finetune import main

    stop_without_launcher()
    main(sys.argv[1:])
