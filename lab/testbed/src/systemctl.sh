#!/bin/sh
# In the place of systemd, where a document's commands are run (doc_runner.rs): starts a unit's ExecStart, as its User,
# and ends it.
set -eu
verb=$1
shift
for unit; do
    case $unit in -*) continue ;; esac
    case $unit in
    nginx) start="/usr/sbin/nginx -g 'daemon off;'" ;;
    *)
        start=$(sed -n 's/^ExecStart=//p' "/var/lib/units/$unit.service")
        user=$(sed -n 's/^User=//p' "/var/lib/units/$unit.service")
        [ -z "$user" ] || start="setpriv --reuid $user --regid $user --clear-groups $start"
        ;;
    esac
    mkdir -p /var/lib/running
    running=/var/lib/running/$unit
    pid=$(cat "$running" 2>/dev/null || true)
    case $verb in
    reload) kill -HUP "$pid" ;;
    stop | restart | start | enable)
        if [ "$verb" != start ] && [ -n "$pid" ]; then
            kill "$pid" 2>/dev/null || true
            while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
            rm -f "$running"
        fi
        [ "$verb" = stop ] && continue
        eval "exec setsid $start" </dev/null >>"/var/log/$unit.log" 2>&1 &
        echo $! >"$running"
        sleep 0.5
        kill -0 "$(cat "$running")" || { cat "/var/log/$unit.log" >&2; exit 1; }
        ;;
    *)
        echo "systemctl: $verb: expected start, stop, restart, reload or enable" >&2
        exit 2
        ;;
    esac
done
