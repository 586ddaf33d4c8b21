# Sourced by quickstart.sh and test.sh: makes .venv in the clone once, with the pinned versions; later runs start at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.installed
want=$(cat constraints.txt pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "CP Zoo needs Python 3.11 or newer; $("$python" --version) was found. Set PYTHON=/path/to/python3.11" >&2
        exit 1
    fi
    echo "setting up .venv (once; a few minutes at most)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    # torch first and pinned: the CPU build where pip is set up for it, else the platform's default build.
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$(grep '^torch==' constraints.txt)"
    .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,plot]'
    echo "$want" > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
