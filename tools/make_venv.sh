#!/bin/sh
# A virtual environment with pip:  make_venv.sh PYTHON FOLDER
# Debian and Ubuntu split pip's bootstrap off Python (package python3-venv); without it there are two more ways to pip.
set -eu
python=$1 folder=$2

if ! command -v "$python" >/dev/null; then
    echo "There is no '$python' here: install Python 3.10 or newer, or name yours with 'make PYTHON=python3.12 ...'." >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "mambacl needs Python 3.10 or newer, this is $("$python" --version): name another with 'make PYTHON=python3.12 ...'." >&2
    exit 1
fi

if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$folder"
elif "$python" -m pip --version >/dev/null 2>&1 && "$python" -m venv --without-pip "$folder" &&
    "$python" -m pip --quiet --python "$folder/bin/python" install pip; then
    :
elif [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "Installing Debian's package python$version-venv, which Python needs to make an environment."
    apt-get update -qq && apt-get install -y -qq "python$version-venv" >/dev/null
    "$python" -m venv "$folder"
else
    echo "Python has no way to make an environment here: run 'sudo apt install python3-venv', then make again." >&2
    exit 1
fi
