//! Which network interfaces and addresses to use, chosen as NCCL chooses them.
//!
//! With `NCCL_SOCKET_IFNAME` those it names, in the kernel's order. Without:
//! `ib*`; else the one whose subnet holds `NCCL_COMM_ID`; else anything but
//! `docker*`, `lo*`, `virbr*`; else those three in that order. Only running
//! interfaces count, IPv6 loopback never does, and `NCCL_SOCKET_FAMILY` filters.
//! One deviation: where NCCL takes an interface's first address, a link-local
//! IPv6 address is taken here only if there is no better one.

use crate::config::Config;
use crate::error::{Error, Result};
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// One address of one interface, as the kernel lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// The interface's name.
    pub name: String,
    /// The address; its port is 0 and an IPv6 link-local one carries its scope.
    pub address: SocketAddr,
    /// The netmask, if the kernel gave one.
    pub netmask: Option<IpAddr>,
    /// Up and physically attached.
    pub running: bool,
}

/// An interface to use and its address, port 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The interface's name.
    pub name: String,
    /// Its address.
    pub address: SocketAddr,
}

fn socket_addr(address: SockaddrStorage) -> Option<SocketAddr> {
    if let Some(v4) = address.as_sockaddr_in() {
        return Some(SocketAddrV4::from(*v4).into());
    }
    address.as_sockaddr_in6().map(|v6| SocketAddrV6::from(*v6).into())
}

/// Every IPv4 and IPv6 address of this host, in the kernel's order.
pub fn present() -> Result<Vec<Present>> {
    let all = nix::ifaddrs::getifaddrs().map_err(|e| Error::system(format!("getifaddrs: {e}")))?;
    Ok(all
        .filter_map(|one| {
            Some(Present {
                address: socket_addr(one.address?)?,
                netmask: one.netmask.and_then(socket_addr).map(|mask| mask.ip()),
                running: one.flags.contains(InterfaceFlags::IFF_RUNNING),
                name: one.interface_name,
            })
        })
        .collect())
}

/// What `config` selects on this host: at least one, in order.
pub fn choose(config: &Config) -> Result<Vec<Chosen>> {
    select(&present()?, config)
}

/// A list in NCCL's syntax: `^` in front excludes, `=` (after it) compares whole names, else prefixes; commas
/// between entries, and what follows a colon is a port that does not matter here.
struct Pattern<'a> {
    exclude: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> Pattern<'a> {
    fn parse(text: &'a str) -> Self {
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text.split(',').map(|entry| entry.split(':').next().unwrap_or(""));
        Self { exclude, exact, names: names.filter(|name| !name.is_empty()).collect() }
    }

    fn takes(&self, name: &str) -> bool {
        // An empty list matches everything, so that `^` with nothing behind it excludes everything: as in NCCL.
        let listed = self.names.is_empty()
            || self.names.iter().any(|&n| if self.exact { name == n } else { name.starts_with(n) });
        listed != self.exclude
    }
}

/// Whether an address means something else on each interface.
pub fn link_local(address: &SocketAddr) -> bool {
    matches!(address, SocketAddr::V6(v6) if v6.ip().is_unicast_link_local())
}

/// An address of a peer, as this host reaches it. A link-local one comes with a number of an interface, its scope,
/// which counts the interfaces of the peer's host; it is reached through one of this host's own. Of those behind `own`
/// that have link-local addresses the `nth` is taken, counted around; with none the address is left as it is.
pub fn through(peer: SocketAddr, own: &[SocketAddr], nth: usize) -> SocketAddr {
    let mut scopes = own.iter().filter(|a| link_local(a)).filter_map(|a| match a {
        SocketAddr::V6(v6) => Some(v6.scope_id()),
        SocketAddr::V4(_) => None,
    });
    match peer {
        SocketAddr::V6(v6) if link_local(&peer) => {
            let count = scopes.clone().count().max(1);
            let scope = scopes.nth(nth % count).unwrap_or(v6.scope_id());
            SocketAddrV6::new(*v6.ip(), v6.port(), v6.flowinfo(), scope).into()
        }
        _ => peer,
    }
}

/// `own` addresses, and behind them those by which this host's other running interfaces reach link-local peers: a
/// cable may lead from an interface that is first on one host to one that is second on another.
pub fn links(own: &[SocketAddr]) -> Vec<SocketAddr> {
    links_among(own, &present().unwrap_or_default())
}

fn links_among(own: &[SocketAddr], present: &[Present]) -> Vec<SocketAddr> {
    let scope = |address: &SocketAddr| match address {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    let mut links = own.to_vec();
    for one in present.iter().filter(|one| one.running && link_local(&one.address)) {
        if !links.iter().any(|known| link_local(known) && scope(known) == scope(&one.address)) {
            links.push(one.address);
        }
    }
    links
}

/// All ways from here to an address of a peer, those through the interfaces of `own` addresses first: one, but for a
/// link-local address.
pub fn ways(peer: SocketAddr, own: &[SocketAddr]) -> Vec<SocketAddr> {
    if !link_local(&peer) {
        return vec![peer];
    }
    let links = links(own);
    (0..links.iter().filter(|link| link_local(link)).count()).map(|nth| through(peer, &links, nth)).collect()
}

/// The interfaces that `pattern` takes, each with its first address that is not link-local, else its first.
/// Interfaces with none but link-local addresses are left out when there are others.
fn matching(present: &[Present], pattern: &str, family: Option<i32>) -> Vec<Chosen> {
    let pattern = Pattern::parse(pattern);
    let mut chosen: Vec<Chosen> = Vec::new();
    for one in present {
        let wrong_family = match (family, one.address) {
            (Some(libc::AF_INET), SocketAddr::V6(_)) | (Some(libc::AF_INET6), SocketAddr::V4(_)) => true,
            (_, SocketAddr::V6(v6)) => v6.ip().is_loopback(),
            _ => false,
        };
        if wrong_family || !one.running || !pattern.takes(&one.name) {
            continue;
        }
        match chosen.iter_mut().find(|c| c.name == one.name) {
            Some(known) if link_local(&known.address) && !link_local(&one.address) => known.address = one.address,
            Some(_) => {}
            None => chosen.push(Chosen { name: one.name.clone(), address: one.address }),
        }
    }
    if chosen.iter().any(|c| !link_local(&c.address)) {
        chosen.retain(|c| !link_local(&c.address));
    }
    chosen
}

/// The first interface whose subnet holds `remote`.
fn same_subnet(present: &[Present], remote: SocketAddr) -> Option<Chosen> {
    let found = present.iter().find(|one| match (one.address, one.netmask, remote) {
        (SocketAddr::V4(a), Some(IpAddr::V4(mask)), SocketAddr::V4(b)) => {
            (a.ip().to_bits() ^ b.ip().to_bits()) & mask.to_bits() == 0
        }
        (SocketAddr::V6(a), Some(IpAddr::V6(mask)), SocketAddr::V6(b)) => {
            (a.ip().to_bits() ^ b.ip().to_bits()) & mask.to_bits() == 0 && a.scope_id() == b.scope_id()
        }
        _ => false,
    })?;
    Some(Chosen { name: found.name.clone(), address: found.address })
}

/// [`choose`] over a given list.
pub fn select(present: &[Present], config: &Config) -> Result<Vec<Chosen>> {
    let family = config.socket_family;
    let chosen = match &config.socket_ifname {
        Some(pattern) => matching(present, pattern, family),
        None => automatic(present, config),
    };
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    let mut asked = Vec::new();
    if let Some(pattern) = &config.socket_ifname {
        asked.push(format!("NCCL_SOCKET_IFNAME={pattern}"));
    }
    match family {
        Some(libc::AF_INET) => asked.push("NCCL_SOCKET_FAMILY=AF_INET".into()),
        Some(libc::AF_INET6) => asked.push("NCCL_SOCKET_FAMILY=AF_INET6".into()),
        _ => {}
    }
    let asked = if asked.is_empty() { String::new() } else { format!(" for {}", asked.join(" ")) };
    let there: Vec<_> = present
        .iter()
        .map(|one| format!("{} ({}{})", one.name, one.address.ip(), if one.running { "" } else { ", not running" }))
        .collect();
    let there = if there.is_empty() { "none".into() } else { there.join(", ") };
    Err(Error::usage(format!("no usable network interface{asked}; present are: {there}")))
}

fn automatic(present: &[Present], config: &Config) -> Vec<Chosen> {
    let family = config.socket_family;
    let subnet = || config.comm_id.as_deref()?.parse().ok().and_then(|remote| same_subnet(present, remote));
    let mut chosen = matching(present, "ib", family);
    if chosen.is_empty() {
        chosen.extend(subnet());
    }
    for pattern in ["^docker,lo,virbr", "docker", "lo", "virbr"] {
        if chosen.is_empty() {
            chosen = matching(present, pattern, family);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(name: &str, ip: &str) -> Present {
        let (ip, scope) = ip.split_once('%').unwrap_or((ip, "0"));
        let address = match ip.parse().unwrap() {
            IpAddr::V4(v4) => SocketAddr::new(v4.into(), 0),
            IpAddr::V6(v6) => SocketAddrV6::new(v6, 0, 0, scope.parse().unwrap()).into(),
        };
        let netmask = match address {
            SocketAddr::V4(_) => "255.255.255.0",
            SocketAddr::V6(_) => "ffff:ffff:ffff:ffff::",
        };
        Present { name: name.into(), address, netmask: Some(netmask.parse().unwrap()), running: true }
    }

    fn host() -> Vec<Present> {
        vec![
            at("lo", "127.0.0.1"),
            at("lo", "::1"),
            at("eth0", "10.0.0.1"),
            at("eth0", "fd00::1"),
            at("eth1", "fe80::2%3"),
            at("eth1", "fd01::2"),
            at("eth10", "10.0.10.1"),
            at("docker0", "172.17.0.1"),
            at("virbr0", "192.168.122.1"),
        ]
    }

    fn names(present: &[Present], ifname: &str, family: Option<i32>) -> String {
        let config = Config {
            socket_ifname: (!ifname.is_empty()).then(|| ifname.into()),
            socket_family: family,
            ..Config::default()
        };
        match select(present, &config) {
            Ok(chosen) => {
                chosen.iter().map(|c| format!("{} {}", c.name, c.address.ip())).collect::<Vec<_>>().join(", ")
            }
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn by_name() {
        let (v4, v6) = (Some(libc::AF_INET), Some(libc::AF_INET6));
        for (ifname, family, expected) in [
            ("", None, "eth0 10.0.0.1, eth1 fd01::2, eth10 10.0.10.1"),
            ("", v4, "eth0 10.0.0.1, eth10 10.0.10.1"),
            ("", v6, "eth0 fd00::1, eth1 fd01::2"),
            ("eth1", None, "eth1 fd01::2, eth10 10.0.10.1"),
            ("=eth1", None, "eth1 fd01::2"),
            ("=eth1:5,lo", None, "lo 127.0.0.1, eth1 fd01::2"),
            ("^eth", None, "lo 127.0.0.1, docker0 172.17.0.1, virbr0 192.168.122.1"),
            ("^=eth1,lo", v4, "eth0 10.0.0.1, eth10 10.0.10.1, docker0 172.17.0.1, virbr0 192.168.122.1"),
            ("docker0,eth0", None, "eth0 10.0.0.1, docker0 172.17.0.1"),
            (",,eth0", None, "eth0 10.0.0.1"),
        ] {
            assert_eq!(names(&host(), ifname, family), expected, "{ifname} {family:?}");
        }
    }

    #[test]
    fn automatic_order() {
        let mut list = host();
        list.push(at("ib0", "10.9.0.1"));
        assert_eq!(names(&list, "", None), "ib0 10.9.0.1");
        list.last_mut().unwrap().running = false;
        assert_eq!(names(&list, "", Some(libc::AF_INET)), "eth0 10.0.0.1, eth10 10.0.10.1");
        list.retain(|p| !p.name.starts_with("eth"));
        assert_eq!(names(&list, "", None), "docker0 172.17.0.1");
        list.retain(|p| !p.name.starts_with("docker"));
        assert_eq!(names(&list, "", None), "lo 127.0.0.1");
        list.retain(|p| !p.name.starts_with("lo"));
        assert_eq!(names(&list, "", None), "virbr0 192.168.122.1");
    }

    #[test]
    fn the_subnet_of_comm_id() {
        let choose = |comm_id: &str, ifname: Option<&str>| {
            let config =
                Config { comm_id: Some(comm_id.into()), socket_ifname: ifname.map(Into::into), ..Config::default() };
            select(&host(), &config).unwrap()[0].name.clone()
        };
        assert_eq!(choose("172.17.0.9:1", None), "docker0");
        assert_eq!(choose("[fd01::9]:1", None), "eth1");
        assert_eq!(choose("1.2.3.4:1", None), "eth0");
        assert_eq!(choose("head-node:1", None), "eth0");
        assert_eq!(choose("172.17.0.9:1", Some("eth10")), "eth10");
    }

    #[test]
    fn link_local_is_the_last_resort_and_keeps_its_scope() {
        let list = [at("eth0", "fe80::1%2"), at("eth1", "10.0.0.1")];
        assert_eq!(names(&list, "", None), "eth1 10.0.0.1");
        assert_eq!(names(&list, "=eth0", None), "eth0 fe80::1");
        let chosen = select(&list[..1], &Config::default()).unwrap();
        assert!(matches!(chosen[0].address, SocketAddr::V6(v6) if v6.scope_id() == 2));
    }

    #[test]
    fn peers_are_reached_through_this_host_s_interfaces() {
        let all = |list: &[&str]| list.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let own = all(&["10.0.0.1:5", "[fe80::1%2]:5", "[fe80::2%3]:5", "[fd00::1]:5"]);
        for (peer, expected) in [
            ("[fe80::9%7]:80", ["[fe80::9%2]:80", "[fe80::9%3]:80", "[fe80::9%2]:80"]),
            ("[fd00::9]:80", ["[fd00::9]:80"; 3]),
            ("10.0.0.9:80", ["10.0.0.9:80"; 3]),
        ] {
            let reached = [0, 1, 2].map(|nth| through(peer.parse().unwrap(), &own, nth));
            assert_eq!(all(&expected), reached, "{peer}");
        }
        let peer = "[fe80::9%7]:80".parse().unwrap();
        assert_eq!(through(peer, &own[..1], 1), peer);
    }

    #[test]
    fn every_interface_that_is_up_may_lead_to_a_link_local_peer() {
        let all = |list: &[&str]| list.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let mut present =
            [at("eth0", "fe80::1%2"), at("eth1", "fe80::2%3"), at("eth2", "fe80::3%4"), at("eth3", "fd00::1")];
        let own = all(&["10.0.0.1:5", "[fe80::2%3]:5"]);
        let links = |present: &[Present]| links_among(&own, present);
        assert_eq!(links(&present), all(&["10.0.0.1:5", "[fe80::2%3]:5", "[fe80::1%2]:0", "[fe80::3%4]:0"]));
        present[0].running = false;
        assert_eq!(links(&present), all(&["10.0.0.1:5", "[fe80::2%3]:5", "[fe80::3%4]:0"]));
        let peer = "10.0.0.9:80".parse().unwrap();
        assert_eq!(ways(peer, &own), [peer]);
        let peer = "[fe80::9%7]:80".parse().unwrap();
        assert_eq!(ways(peer, &own)[0], "[fe80::9%3]:80".parse().unwrap());
    }

    #[test]
    fn none_is_an_error_that_lists_what_is_there() {
        let mut list = host();
        list[2].running = false;
        let error = names(&list, "=mlx0", Some(libc::AF_INET));
        assert!(error.contains("NCCL_SOCKET_IFNAME==mlx0 NCCL_SOCKET_FAMILY=AF_INET"), "{error}");
        assert!(error.contains("eth0 (10.0.0.1, not running)") && error.contains("virbr0"), "{error}");
        assert!(names(&[], "", None).ends_with("present are: none"));
        assert!(names(&list, "^,", None).contains("error"));
    }

    #[test]
    fn this_host_has_a_loopback() {
        assert!(present().unwrap().iter().any(|one| one.address.ip().is_loopback()));
    }
}
