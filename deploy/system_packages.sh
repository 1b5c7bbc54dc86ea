#!/bin/sh
# system_packages.sh [--ask] PACKAGE...: Debian's packages that pip does not have, where they are missing.
# As root or where sudo asks nothing they are installed; with --ask sudo may ask. Where neither may be,
# it says what would do it and ends well (with --ask: badly): what needs them skips, and says so again.
# Nothing is asked of the network while all are there.
set -u
PATH="$PATH:/usr/sbin:/sbin"

programs() { # of a package; one after "|" is as good as the one before it
    case $1 in
    chromium) echo "chromium|chromium-browser|google-chrome" ;;
    etcd-server) echo "etcd" ;;
    iproute2) echo "ip tc" ;;
    *) echo "$1" ;;
    esac
}

here() {
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

without() {
    echo "Without$missing: $1. What needs them is skipped, or says that it went without." >&2
    [ "$ask" ] && exit 1
    exit 0
}

command -v apt-get >/dev/null || without "no apt-get here; install them as this machine does"
if [ "$(id -u)" = 0 ]; then
    may=
elif command -v sudo >/dev/null && { [ "$ask" ] || sudo -n true 2>/dev/null; }; then
    may="sudo"
else
    without "this user may not install them; \`make system-packages\` asks sudo, or as root: apt-get install$missing"
fi

echo "installing$missing (Debian's)" >&2
install() {
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive $may apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 install --quiet --yes \
        --no-install-recommends $missing </dev/null
}
# Its lists may be missing or old, as in a fresh container: then they are fetched once.
said=$(install 2>&1) && exit 0
$may apt-get -o Acquire::Retries=3 update --quiet >/dev/null 2>&1
said=$(install 2>&1) && exit 0
echo "$said" | tail -n 5 >&2
without "apt-get could not install them"
