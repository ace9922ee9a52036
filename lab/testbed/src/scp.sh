#!/bin/sh
# In the place of scp, where a document's commands are run (doc_runner.rs): scp [-q] FILE ... MACHINE:DIRECTORY/
set -eu
case $1 in -*) shift ;; esac
for target; do :; done
machine=${target%%:*}
directory=${target#*:}
while [ $# -gt 1 ]; do
    # shellcheck disable=SC2016 # for the other machine's shell
    nsenter --target "$(cat "@MACHINES@/machine-$machine/pid")" --mount \
        sh -eu -c 'cat > "$1" && chmod "$2" "$1"' - "$directory$(basename "$1")" "$(stat -c %a "$1")" <"$1"
    shift
done
