use super::*;

fn one(name: &'static str, value: &'static str) -> (Config, Vec<String>) {
    assert!(VARIABLES.iter().any(|v| v.name == name));
    Config::parse(|asked| (asked == name).then(|| value.to_owned()))
}

#[test]
fn nothing_set_is_the_default() {
    let (config, problems) = Config::parse(|_| None);
    assert_eq!((config, problems), (Config::default(), vec![]));
    assert_eq!(Config::parse(|_| Some(String::new())).0, Config::default());
}

#[test]
fn the_documented_defaults_are_the_defaults() {
    for v in VARIABLES {
        let config = Config::parse(|asked| (asked == v.name).then(|| v.default.to_owned())).0;
        if v.default.parse::<i64>().is_ok() || v.default == "auto" {
            assert_eq!(config, Config::default(), "{}", v.name);
        }
    }
}

#[test]
fn good_values() {
    assert_eq!(one("OXYGIN_FABRIC", "soft").0.fabric, FabricChoice::Soft);
    assert_eq!(one("OXYGIN_TIMEOUT", "0.25").0.timeout, Duration::from_millis(250));
    assert_eq!(one("OXYGIN_SOFT_TRANSPORT", "no-cma").0.soft_transport, SoftTransport::NoCma);
    assert_eq!(one("NCCL_SOCKET_FAMILY", "AF_INET6").0.socket_family, Some(libc::AF_INET6));
    assert_eq!(one("NCCL_IB_TC", "0x6a").0.ib_tc, Some(106));
    assert_eq!(one("NCCL_IB_TC", "-1").0.ib_tc, None);
    assert_eq!(one("NCCL_IB_TIMEOUT", "026").0.ib_timeout, 22);
    assert!(!one("NCCL_DMABUF_ENABLE", "0").0.dma_buf);
    assert!(one("NCCL_IB_ADDR_FAMILY", "AF_INET6").0.ib_wants_ipv6);
    assert_eq!(one("NCCL_IB_ADDR_RANGE", "10.0.0.0/8").0.ib_address_range, AddressRange::parse("10.0.0.0/8"));
    assert_eq!(one("NCCL_SOCKET_IFNAME", "^").0.socket_ifname, None);
    assert_eq!(one("OXYGIN_ENGINE", "gdaki-soft").0.engine, EngineChoice::GdakiSoft);
    assert_eq!(one("OXYGIN_GDAKI_SIGNALS", "per-peer").0.gdaki_signals, GdakiSignals::PerPeer);
    let both = |name: &str| match name {
        "NCCL_IB_TC" => Some("8".into()),
        "NCCL_GIN_IB_TC" => Some("16".into()),
        _ => None,
    };
    assert_eq!(Config::parse(both).0.ib_tc, Some(16));
}

#[test]
fn a_peer_may_be_silent_for_as_long_as_verbs_would_try_again() {
    let limit = |name, value| one(name, value).0.peer_limit();
    assert_eq!(Config::default().peer_limit(), Duration::from_secs(35));
    assert_eq!(limit("NCCL_IB_TIMEOUT", "22").as_secs(), 138);
    assert_eq!(limit("NCCL_IB_TIMEOUT", "10"), Duration::from_secs(30));
    assert_eq!(limit("NCCL_IB_RETRY_CNT", "0"), Duration::from_secs(30));
    assert_eq!([limit("NCCL_IB_TIMEOUT", "0"), limit("NCCL_IB_TIMEOUT", "31")].map(|l| l.as_secs()), [86_400, 70_369]);
    assert_eq!(limit("OXYGIN_PEER_TIMEOUT", "0.5"), Duration::from_millis(500));
}

#[test]
fn bad_values_keep_the_default_and_are_told() {
    for (name, value) in [
        ("OXYGIN_FABRIC", "Soft"),
        ("OXYGIN_TIMEOUT", "0"),
        ("OXYGIN_TIMEOUT", "-3"),
        ("OXYGIN_TIMEOUT", "NaN"),
        ("OXYGIN_TIMEOUT", "inf"),
        ("OXYGIN_TIMEOUT", "2m"),
        ("OXYGIN_PEER_TIMEOUT", "0"),
        ("OXYGIN_TCP_STRIPES", "0"),
        ("OXYGIN_ENGINE", "gdaki-hard"),
        ("OXYGIN_GDAKI_SIGNALS", "none"),
        ("OXYGIN_MAX_OPERATIONS", "99999999999999999999"),
        ("NCCL_SOCKET_FAMILY", "inet6"),
        ("NCCL_IB_TC", "256"),
        ("NCCL_IB_TC", "0x"),
        ("NCCL_IB_TC", "--1"),
        ("NCCL_IB_SL", "-2"),
        ("NCCL_IB_TIMEOUT", "20 s"),
        ("NCCL_IB_RETRY_CNT", "8"),
        ("NCCL_IB_ROCE_VERSION_NUM", "3"),
        ("NCCL_IB_ADDR_FAMILY", "IPv6"),
        ("NCCL_IB_ADDR_RANGE", "10.0.0.0"),
        ("NCCL_DMABUF_ENABLE", "yes"),
        ("NCCL_GIN_GDAKI_NIC_HANDLER", "6"),
    ] {
        let (config, problems) = one(name, value);
        assert_eq!(config, Config::default(), "{name}={value}");
        assert_eq!(problems.len(), 1, "{name}={value}");
        let accepted = VARIABLES.iter().find(|v| v.name == name).unwrap().accepted;
        assert!(problems[0].contains(name) && problems[0].contains(accepted), "{}", problems[0]);
    }
}

#[test]
fn unknown_names() {
    assert!(unknown("OXYGIN_TIMEOUT").is_none());
    assert!(unknown("NCCL_WHATEVER").is_none());
    assert!(unknown("OXYGIN_TIMOUT").unwrap().contains("did you mean OXYGIN_TIMEOUT?"));
    assert!(unknown("OXYGIN_SOMETHING_ELSE").unwrap().contains("OXYGIN_FABRIC"));
}

#[test]
fn a_problem_is_told_once_a_process() {
    let problems = || vec!["a test's problem".to_owned(), "another".to_owned()];
    assert_eq!(fresh(problems()), problems());
    assert!(fresh(problems()).is_empty());
}

#[test]
fn the_page_is_in_step() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/environment.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, markdown()).unwrap();
    }
    let page = std::fs::read_to_string(path).unwrap();
    assert!(page == markdown(), "{path} is out of step; write it anew with UPDATE_DOCS=1 cargo test the_page");
}

#[test]
fn every_name_once() {
    let names: BTreeSet<_> = VARIABLES.iter().map(|v| v.name).collect();
    assert_eq!(names.len(), VARIABLES.len());
}
