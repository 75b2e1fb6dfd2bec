# shellcheck shell=bash
# Hosts out of namespaces: each with a network, processes, mounts and shared memory of its own, so that nothing which
# only works inside one machine works between them. Source scripts/lib.sh first.
#
# Host i has eth0 (10.91.0.i, fd91::i) on the network under test and ctl0 (10.92.0.i) on one for the test's own talk,
# which stays up when the first is cut.

hosts_prefix=ox$$
hosts_made=0

hosts_need_namespaces() {
    [ "$(id -u)" = 0 ] && ip netns add "$hosts_prefix-try" 2>/dev/null && ip netns del "$hosts_prefix-try" &&
        unshare --pid --mount --ipc --fork true 2>/dev/null
}

# hosts_up N: makes hosts 1 to N and a switch between them.
hosts_up() {
    local n=$1 i net
    hosts_made=$n
    ip netns add "$hosts_prefix-sw"
    for net in data ctl; do
        ip -n "$hosts_prefix-sw" link add "$net" type bridge
        ip -n "$hosts_prefix-sw" link set "$net" up
    done
    for i in $(seq "$n"); do
        local host=$hosts_prefix-$i
        ip netns add "$host"
        ip -n "$host" link set lo up
        # An interface has another number on each host.
        for _ in $(seq "$i"); do
            ip -n "$host" link add pad type veth peer name pad2
            ip -n "$host" link del pad
        done
        ip -n "$hosts_prefix-sw" link add "data$i" type veth peer name eth0 netns "$host"
        ip -n "$hosts_prefix-sw" link add "ctl$i" type veth peer name ctl0 netns "$host"
        for net in data ctl; do
            ip -n "$hosts_prefix-sw" link set "$net$i" master "$net" up
        done
        ip -n "$host" addr add "10.91.0.$i/24" dev eth0
        ip -n "$host" addr add "fd91::$i/64" dev eth0 nodad
        ip -n "$host" addr add "10.92.0.$i/24" dev ctl0
        ip -n "$host" link set eth0 up
        ip -n "$host" link set ctl0 up
    done
    # Where many interfaces come and go the kernel says only once a second which of them are running.
    for i in $(seq "$n"); do
        for _ in $(seq 100); do
            [ "$(ip -n "$hosts_prefix-$i" -o link show up | grep -c 'eth0.* state UP\|ctl0.* state UP')" = 2 ] && continue 2
            sleep 0.1
        done
        echo "host $i is not connected" >&2
        return 1
    done
}

# hosts_link_local: leaves the hosts nothing on the network under test but the link-local addresses of their interfaces.
hosts_link_local() {
    local i host
    for i in $(seq "$hosts_made"); do
        host=$hosts_prefix-$i
        ip -n "$host" addr del "10.91.0.$i/24" dev eth0
        ip -n "$host" addr del "fd91::$i/64" dev eth0
        for _ in $(seq 100); do
            ip -n "$host" -6 addr show dev eth0 scope link -tentative | grep -q fe80 && continue 2
            sleep 0.1
        done
        echo "host $i has no link-local address" >&2
        return 1
    done
}

# hosts_crossed: leaves two hosts one common network and only link-local addresses on it: host 1's eth0 is wired to host 2's
# eth1. Host 2's eth0 and host 1's eth1 are up, and lead to nobody.
hosts_crossed() {
    local host i
    hosts_link_local
    for i in 1 2; do
        host=$hosts_prefix-$i
        ip -n "$hosts_prefix-sw" link add "other$i" type veth peer name eth1 netns "$host"
        ip -n "$hosts_prefix-sw" link set "other$i" up
        ip -n "$host" link set eth1 up
    done
    ip -n "$hosts_prefix-sw" link set data2 nomaster
    ip -n "$hosts_prefix-sw" link set other2 master data
    for i in 1 2; do
        for _ in $(seq 100); do
            [ "$(ip -n "$hosts_prefix-$i" -6 -o addr show scope link -tentative | grep -c 'eth[01].*fe80')" = 2 ] && continue 2
            sleep 0.1
        done
        echo "host $i has no link-local addresses" >&2
        return 1
    done
}

# hosts_run I COMMAND...: runs it on host I; all its processes end with it.
hosts_run() {
    local i=$1
    shift
    ip netns exec "$hosts_prefix-$i" unshare --pid --mount --ipc --uts --fork --kill-child --mount-proc \
        bash -c 'mount -t tmpfs tmpfs /dev/shm && hostname "$1" && shift && exec "$@"' _ "host$i" "$@"
}

# hosts_cut I: pulls the cable of the network under test out of host I.
hosts_cut() {
    ip -n "$hosts_prefix-sw" link set "data$1" down
}

hosts_down() {
    local i
    for i in sw $(seq "$hosts_made"); do
        ip netns del "$hosts_prefix-$i" 2>/dev/null || true
    done
    hosts_made=0
}
