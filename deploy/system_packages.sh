#!/bin/sh
# system_packages.sh [--ask] PACKAGE...: install those of these Debian packages that are missing.
# The script installs as root, or with a sudo that needs no password; with --ask, sudo may ask for one.
# If it may not install, it prints which tests are skipped and which command installs the packages, and exits with 0,
# or with 1 after --ask. It does not use the network if no package is missing.
set -u
PATH="$PATH:/usr/sbin:/sbin"

programs() { # the programs of a package; "|" separates alternatives
    case $1 in
    chromium) echo "chromium|chromium-browser|google-chrome" ;;
    etcd-server) echo "etcd" ;;
    iproute2) echo "ip tc" ;;
    *) echo "$1" ;;
    esac
}

here() {
    case $1 in python*-venv) "${1%-venv}" -c 'import ensurepip' 2>/dev/null; return ;; esac
    for one in $(programs "$1"); do
        found=
        for program in $(echo "$one" | tr '|' ' '); do
            command -v "$program" >/dev/null && found=1
        done
        [ "$found" ] || return 1
    done
}

ask=
[ "${1:-}" = --ask ] && ask=1 && shift
missing=
for package; do here "$package" || missing="$missing $package"; done
[ "$missing" ] || exit 0

marked() { # the test files that are skipped without a program
    cd "$(dirname "$0")/.." && grep -rl --include='*.py' "needs(\"$1\")" tests | sort | tr '\n' ' '
}

lacks() {
    case $1 in
    chromium) echo "the tests that open the bench's page in a browser are skipped: $(marked chromium)" ;;
    etcd-server) echo "the tests that keep a roster in etcd are skipped: $(marked etcd)" ;;
    python*-venv) echo "no environment can be created, because \`${1%-venv} -m venv\` needs it" ;;
    iproute2) echo "the bench's hosts use loopback, and the tests with their own networks are skipped: $(marked ip)" ;;
    esac
}

without() {
    echo "missing$missing: $1" >&2
    for package in $missing; do echo "  without $package $(lacks "$package")" >&2; done
    [ "$ask" ] && exit 1
    exit 0
}

command -v apt-get >/dev/null || without "there is no apt-get: install them with this machine's package manager"
if [ "$(id -u)" = 0 ]; then
    may=
elif command -v sudo >/dev/null && { [ "$ask" ] || sudo -n true 2>/dev/null; }; then
    may="sudo"
else
    without "this user may not install them: run \`make system-packages\`, or as root: apt-get install$missing"
fi

echo "installing Debian's$missing with apt-get" >&2
install() {
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive $may apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 install --quiet --yes \
        --no-install-recommends $missing </dev/null
}
# The package lists may be missing or old, as in a fresh container: update them once.
said=$(install 2>&1) && exit 0
$may apt-get -o Acquire::Retries=3 update --quiet >/dev/null 2>&1
said=$(install 2>&1) && exit 0
echo "$said" | tail -n 5 >&2
without "apt-get could not install them"
