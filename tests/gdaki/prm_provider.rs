//! The provider's fields of commands, whose origin is Linux, against the fake's, whose origins are DPDK and rdma-core's
//! tests: bit by bit, so that one misreading cannot be in both.

use fake_verbs::mlx5::prm::commands::*;
use fake_verbs::mlx5::prm::{self, Layout};
use oxygin::gdaki::mlx5::command::fields::Field;
use oxygin::gdaki::mlx5::command::{capabilities, completion_queue, fields, path, queue_pair, transition};
use std::collections::BTreeSet;
use std::ffi::CString;
use std::path::Path;

/// Fields of a module by their names, which are those of the layout in capitals.
macro_rules! named {
    ($module:path: $($name:ident)*) => {{
        use $module as of;
        [$((stringify!($name), of::$name)),*]
    }};
}

/// What was compared: module and name.
#[derive(Default)]
struct Compared(BTreeSet<String>);

impl Compared {
    /// Holds fields that begin `base` bits into a layout against those of it that are called `prefix` and their name.
    fn fields<const N: usize>(&mut self, of: &Layout, base: usize, prefix: &str, ours: [(&'static str, Field); N]) {
        for (name, field) in ours {
            let theirs = format!("{prefix}{}", name.to_lowercase());
            self.one(of, base, name, field, &theirs);
        }
    }

    fn one(&mut self, of: &Layout, base: usize, name: &'static str, field: Field, theirs: &str) {
        let found = of.fields().find(|f| f.0 == theirs);
        let (_, at, bits, origin) = found.unwrap_or_else(|| panic!("no second origin has {}: {theirs}", of.name));
        let (ours, other) = ((base + field.offset, field.width), (at as usize, bits as usize));
        assert_eq!(ours, other, "{}: {theirs} (first bit, width), on the right by {}", of.name, origin.files());
        // The same bits of the same bytes: one by one.
        for bit in 0..field.width {
            // Longer than any of these layouts.
            let mut message = capabilities::Answer::default();
            let field = Field { offset: ours.0, ..field };
            message.set(field, 1 << bit);
            let mut bytes = vec![0; message.bytes().len()];
            prm::write(&mut bytes, at, bits, 1 << bit);
            assert!(message.bytes() == bytes, "{theirs}: bit {bit}");
            assert_eq!(message.get(field), 1 << bit);
        }
        self.0.insert(name.to_owned());
    }

    /// A place in a layout where something begins: that of the field `theirs`.
    fn place(&mut self, of: &Layout, name: &'static str, ours: usize, theirs: &str) {
        let found = of.fields().find(|f| f.0 == theirs).map(|f| f.1 as usize);
        assert_eq!(Some(ours), found, "{}: {name}, which begins with {theirs}", of.name);
        self.0.insert(name.to_owned());
    }
}

fn heads(compared: &mut Compared) {
    for layout in [&CREATE_CQ_IN, &CREATE_QP_IN, &MODIFY_QP_IN, &STOP_QP_IN, &QUERY_QP_IN, &QUERY_HCA_CAP_IN] {
        compared.fields(layout, 0, "", named!(fields: OPCODE OP_MOD));
    }
    for layout in [&CREATE_CQ_OUT, &CREATE_QP_OUT, &QUERY_QP_OUT, &GENERAL_CAP_OUT, &PLAIN_OUT] {
        compared.fields(layout, 0, "", named!(fields: STATUS SYNDROME));
    }
}

fn completion_queues(compared: &mut Compared) {
    let in_context = named!(completion_queue::fields:
        DBR_UMEM_VALID CQE_SZ CC OI DBR_UMEM_ID LOG_CQ_SIZE UAR_PAGE DBR_ADDR);
    compared.fields(&CREATE_CQ_IN, 0, "cq_context.", in_context);
    compared.fields(&CREATE_CQ_IN, 0, "", named!(completion_queue::fields: CQ_UMEM_OFFSET CQ_UMEM_ID CQ_UMEM_VALID));
    compared.fields(&CREATE_CQ_OUT, 0, "", named!(completion_queue::fields: CQN));
    compared.place(&CREATE_CQ_IN, "CQC", completion_queue::fields::CQC, "cq_context.status");
    // Linux counts the word's reserved bits in: numbers of event queues have 8 bits in the other two.
    let eqn = completion_queue::fields::C_EQN_OR_APU_ELEMENT;
    let low = Field { offset: eqn.offset + eqn.width - 8, width: 8 };
    compared.one(&CREATE_CQ_IN, 0, "C_EQN_OR_APU_ELEMENT", low, "cq_context.c_eqn");
}

fn queue_pairs(compared: &mut Compared) {
    let context = named!(queue_pair::qpc:
        STATE LAG_TX_PORT_AFFINITY ST PM_STATE PD MTU LOG_MSG_MAX LOG_SQ_SIZE TS_FORMAT UAR_PAGE SEND_DBR_MODE
        REMOTE_QPN LOG_SRA_MAX RETRY_COUNT RNR_RETRY NEXT_SEND_PSN CQN_SND LOG_RRA_MAX ATOMIC_MODE RRE RWE RAE CD_MASTER
        MIN_RNR_NAK NEXT_RCV_PSN DBR_ADDR RQ_TYPE HW_SQ_WQEBB_COUNTER SW_SQ_WQEBB_COUNTER DBR_UMEM_VALID DBR_UMEM_ID);
    let (start, to_path) = (queue_pair::fields::QPC, queue_pair::qpc::PRIMARY_ADDRESS_PATH);
    for layout in [&CREATE_QP_IN, &MODIFY_QP_IN, &QUERY_QP_OUT] {
        compared.place(layout, "QPC", start, "qpc.state");
        compared.fields(layout, start, "qpc.", context);
        compared.place(layout, "PRIMARY_ADDRESS_PATH", start + to_path, "qpc.primary_address_path.fl");
    }
    compared.fields(&CREATE_QP_IN, 0, "", named!(queue_pair::fields: WQ_UMEM_OFFSET WQ_UMEM_ID WQ_UMEM_VALID));
    for layout in [&CREATE_QP_OUT, &MODIFY_QP_IN, &STOP_QP_IN, &QUERY_QP_IN] {
        compared.fields(layout, 0, "", named!(queue_pair::fields: QPN));
    }
    compared.fields(&MODIFY_QP_IN, 0, "", named!(transition: OPT_PARAM_MASK));
}

fn paths(compared: &mut Compared) {
    let base = queue_pair::fields::QPC + queue_pair::qpc::PRIMARY_ADDRESS_PATH;
    let all = named!(path::fields:
        PKEY_INDEX GRH MLID RLID ACK_TIMEOUT SRC_ADDR_INDEX STAT_RATE HOP_LIMIT TCLASS FLOW_LABEL DSCP UDP_SPORT
        ETH_PRIO SL VHCA_PORT_NUM);
    compared.fields(&MODIFY_QP_IN, base, "qpc.primary_address_path.", all);
    for (name, ours) in [("RGID_RIP", path::fields::RGID_RIP), ("RMAC", path::fields::RMAC)] {
        let theirs = if name == "RMAC" { "rmac_47_32" } else { "rgid_rip" };
        compared.place(&MODIFY_QP_IN, name, base + ours, &format!("qpc.primary_address_path.{theirs}"));
    }
}

fn device(compared: &mut Compared) {
    let general = named!(capabilities::general:
        HCA_CAP_2 LOG_MAX_QP_SZ LOG_MAX_QP LOG_MAX_CQ_SZ LOG_MAX_CQ LOG_MAX_RA_REQ_QP LOG_MAX_RA_RES_QP PORT_TYPE
        LOG_MAX_MSG INIT2_LAG_TX_PORT_AFFINITY ROCE ATOMIC CQ_OI CD RC LAG_TX_PORT_AFFINITY NUM_LAG_PORTS
        RTS2RTS_LAG_TX_PORT_AFFINITY SQ_TS_FORMAT);
    compared.fields(&GENERAL_CAP_OUT, 0, "capability.", general);
    let roce = named!(capabilities::roce: QP_TS_FORMAT R_ROCE_MAX_SRC_UDP_PORT R_ROCE_MIN_SRC_UDP_PORT);
    compared.fields(&ROCE_CAP_OUT, 0, "capability.", roce);
    let more = named!(capabilities::general_2: SEND_DBR_MODE_NO_DBR_EXT LOG_MAX_SEND_DBR_LESS_QP_SQ);
    compared.fields(&GENERAL_2_CAP_OUT, 0, "capability.", more);
}

/// Names of fields, and of places, that the provider's source has.
fn declared() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/gdaki/mlx5/command");
    let mut names = BTreeSet::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for line in text.lines().map(str::trim_start) {
            let rest = line.strip_prefix("pub const ").or_else(|| line.strip_prefix("const "));
            let Some((name, rest)) = rest.and_then(|rest| rest.split_once(": ")) else { continue };
            if rest.starts_with("Field = ") || rest.starts_with("usize = 0x") {
                names.insert(name.to_owned());
            }
        }
    }
    names
}

#[test]
fn fields_are_where_another_origin_has_them() {
    let mut compared = Compared::default();
    heads(&mut compared);
    completion_queues(&mut compared);
    queue_pairs(&mut compared);
    paths(&mut compared);
    device(&mut compared);
    let missing: Vec<_> = declared().difference(&compared.0).cloned().collect();
    // Where capabilities begin in an answer is compared with each of them.
    assert!(missing.iter().all(|name| name == "START"), "fields that nothing was held against: {missing:?}");
    assert!(compared.0.len() > 80, "{} fields", compared.0.len());
}

#[test]
fn opcodes_are_those_of_another_origin() {
    let ours = [
        (fields::QUERY_HCA_CAP, prm::opcode::QUERY_HCA_CAP),
        (fields::CREATE_CQ, prm::opcode::CREATE_CQ),
        (fields::CREATE_QP, prm::opcode::CREATE_QP),
        (fields::RST2INIT_QP, prm::opcode::RST2INIT),
        (fields::INIT2RTR_QP, prm::opcode::INIT2RTR),
        (fields::RTR2RTS_QP, prm::opcode::RTR2RTS),
        (fields::RTS2RTS_QP, prm::opcode::RTS2RTS),
        (fields::TO_ERR_QP, prm::opcode::TO_ERR),
        (fields::TO_RST_QP, prm::opcode::TO_RST),
        (fields::QUERY_QP, prm::opcode::QUERY_QP),
    ];
    ours.into_iter().for_each(|(ours, theirs)| assert_eq!(ours, u64::from(theirs)));
}

/// What follows `start` up to the next quote.
fn quoted<'a>(text: &'a str, start: &str) -> Option<&'a str> {
    text.split_once(start)?.1.split_once('"').map(|(name, _)| name)
}

#[test]
fn functions_are_asked_for_in_the_versions_in_which_they_came() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("ffi/src/mlx5/symbols.rs");
    let text = std::fs::read_to_string(source).unwrap();
    let library = CString::new(fake_verbs::mlx5::LIBRARY).unwrap();
    let mut asked = 0;
    for part in text.split("c\"mlx5dv_").skip(1) {
        let (name, rest) = part.split_once('"').unwrap();
        let name = CString::new(format!("mlx5dv_{name}")).unwrap();
        let version = quoted(rest.split("c\"mlx5dv_").next().unwrap(), "c\"MLX5_").expect("each has a version");
        let version = CString::new(format!("MLX5_{version}")).unwrap();
        // SAFETY: our own library; names are only looked for.
        let found = unsafe {
            let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
            let found = libc::dlvsym(library, name.as_ptr(), version.as_ptr());
            libc::dlclose(library);
            found
        };
        assert!(!found.is_null(), "libmlx5 has no {name:?} in version {version:?}");
        asked += 1;
    }
    assert!(asked >= 10, "{asked} functions");
}
