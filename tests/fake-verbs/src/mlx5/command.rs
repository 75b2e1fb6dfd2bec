//! Commands: which are taken from whom, which fail because a test wants it, and what is answered.

use super::objects::Kind;
use super::prm::{commands, opcode, status};
use crate::world::World;

/// Why the device does not do a command.
#[derive(Debug)]
pub struct Refusal {
    pub status: u8,
    pub syndrome: u32,
    pub sentence: String,
}

impl Refusal {
    pub fn new(status: u8, line: u32, sentence: String) -> Self {
        // A device's syndromes are its maker's secret; these are the fake's.
        Self { status, syndrome: 0x00fa_0000 + line, sentence }
    }
}

/// Returns a refusal: a status, then a sentence.
macro_rules! refuse {
    ($status:expr, $($sentence:tt)+) => {
        return Err($crate::mlx5::command::Refusal::new($status, line!(), format!($($sentence)+)))
    };
}
pub(super) use refuse;

/// By which function a command comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Create,
    Modify(Kind),
    Query(Kind),
    General,
}

impl Call {
    /// Whether the kernel lets a command with this opcode through.
    fn takes(self, op: u16) -> bool {
        match self {
            Self::Create => matches!(op, opcode::CREATE_CQ | opcode::CREATE_QP),
            Self::Modify(Kind::Qp(_)) => {
                (opcode::RST2INIT..=opcode::RTS2RTS).contains(&op) || matches!(op, opcode::TO_ERR | opcode::TO_RST)
            }
            Self::Query(Kind::Qp(_)) => op == opcode::QUERY_QP,
            Self::Modify(Kind::Cq(_)) | Self::Query(Kind::Cq(_)) => false,
            Self::General => op == opcode::QUERY_HCA_CAP,
        }
    }
}

/// What became of a command: an errno, and an object if it made one.
pub type Outcome = Result<Option<Kind>, i32>;

impl World {
    /// Carries a command out and writes the answer.
    pub fn mlx5_command(&mut self, context: usize, device: usize, call: Call, input: &[u8], out: &mut [u8]) -> Outcome {
        out.fill(0);
        if input.len() < 16 || out.len() < 16 {
            return Err(libc::EINVAL);
        }
        let op = commands::CREATE_CQ_IN.get(input, "opcode") as u16;
        if !self.mlx5.contexts.contains(&context) {
            return Err(libc::EOPNOTSUPP);
        }
        if !call.takes(op) {
            eprintln!("fake mlx5: the kernel lets no command {op:#x} through a call for {call:?}");
            return Err(libc::EINVAL);
        }
        self.settings.count("mlx5_commands", 1);
        let done = match self.fails(op) {
            Some(refusal) => Err(refusal),
            None => self.carry_out_command(context, device, call, op, input, out),
        };
        match done {
            Ok(made) => Ok(made),
            Err(refusal) => {
                self.settings.count("mlx5_refused", 1);
                commands::PLAIN_OUT.set(out, "status", refusal.status.into());
                commands::PLAIN_OUT.set(out, "syndrome", refusal.syndrome.into());
                self.mlx5.refusal = refusal.sentence;
                // As kernels do when the device, not they, refused it.
                Err(libc::EREMOTEIO)
            }
        }
    }

    /// Whether a test wants this command to fail.
    fn fails(&mut self, op: u16) -> Option<Refusal> {
        let (left, only) = (self.settings.get("mlx5_fail_in", 0), self.settings.get("mlx5_fail_opcode", 0));
        if left == 0 || (only != 0 && only != i64::from(op)) {
            return None;
        }
        self.settings.set("mlx5_fail_in", left - 1);
        (left == 1).then(|| Refusal {
            status: self.settings.get("mlx5_fail_status", 0) as u8,
            syndrome: self.settings.get("mlx5_fail_syndrome", 0) as u32,
            sentence: format!("a test wants command {op:#x} to fail"),
        })
    }

    fn carry_out_command(
        &mut self,
        context: usize,
        device: usize,
        call: Call,
        op: u16,
        input: &[u8],
        out: &mut [u8],
    ) -> Result<Option<Kind>, Refusal> {
        let done = self.checked(op, input, out).and_then(|()| match (op, call) {
            (opcode::CREATE_CQ, _) => self.create_cq(context, device, input, out).map(Some),
            (opcode::CREATE_QP, _) => self.create_qp(context, device, input, out).map(Some),
            (opcode::QUERY_HCA_CAP, _) => self.query_capabilities(device, input, out).map(|()| None),
            (opcode::QUERY_QP, Call::Query(Kind::Qp(number))) => self.query_qp(number, input, out).map(|()| None),
            (_, Call::Modify(Kind::Qp(number))) => self.modify_qp(number, op, input).map(|()| None),
            _ => refuse!(status::BAD_OP, "the fake knows no command {op:#x}"),
        });
        done.inspect_err(|refusal| eprintln!("fake mlx5: command {op:#x} is refused: {}", refusal.sentence))
    }

    /// What holds for every command: its length, its reserved bits, its op_mod.
    fn checked(&self, op: u16, input: &[u8], out: &[u8]) -> Result<(), Refusal> {
        let Some((asked, answered)) = commands::of(op) else { refuse!(status::BAD_OP, "no command {op:#x}") };
        if input.len() < asked.bytes {
            refuse!(status::BAD_INP_LEN, "{} bytes of {}, which has {}", input.len(), asked.name, asked.bytes);
        }
        if out.len() < answered.bytes {
            refuse!(
                status::BAD_OUTP_LEN,
                "room for {} bytes of {}, which has {}",
                out.len(),
                answered.name,
                answered.bytes
            );
        }
        if let Some(bit) = asked.reserved_bit(input) {
            refuse!(status::BAD_PARAM, "bit {bit:#x} of {} is reserved and set", asked.name);
        }
        if let Some(byte) = input[asked.bytes..].iter().position(|&b| b != 0) {
            refuse!(status::BAD_PARAM, "byte {} behind {} is set", asked.bytes + byte, asked.name);
        }
        let op_mod = asked.get(input, "op_mod");
        if op != opcode::QUERY_HCA_CAP && op_mod != 0 {
            refuse!(status::BAD_OP, "op_mod {op_mod:#x} of {}", asked.name);
        }
        Ok(())
    }
}
