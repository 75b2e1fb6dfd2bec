//! Reads PTX: as much of it as the kernels are written in.

use std::collections::HashMap;

/// What an instruction names.
#[derive(Clone, Debug)]
pub enum Operand {
    Reg(usize),
    Value(u64),
    /// `{r0, r1}`.
    Group(Vec<usize>),
    /// `[r0+8]`.
    At(usize, u64),
    /// `%tid.x`.
    Thread,
    /// `%ctaid.x`.
    Block,
    /// `%ntid.x`.
    Threads,
    /// `%globaltimer`.
    Timer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vote {
    Ballot,
    Any,
    All,
}

/// How strong a load is.
#[derive(Clone, Copy, Debug)]
pub struct Strength {
    pub acquires: bool,
    /// At the scope of all, not that of the GPU alone.
    pub all: bool,
}

#[derive(Clone, Copy, Debug)]
pub enum What {
    Param(usize),
    /// Of two values, and bits.
    Compute(fn(u64, u64, u32) -> u64),
    Not,
    Reverse,
    LeadingZeros,
    Count,
    Move,
    Compare(fn(u64, u64) -> bool),
    /// Of four of eight bytes each.
    Permute,
    Load(Strength),
    Store {
        strong: bool,
    },
    Release,
    /// Without and with the value that was there.
    Add,
    FetchAdd,
    /// In the block's memory, an addition without a result, and an exchange where what is there is as expected.
    SharedAdd {
        releases: bool,
    },
    SharedExchange {
        acquires: bool,
    },
    Fence {
        /// As above.
        all: bool,
    },
    Sleep,
    Branch(usize),
    Return,
    // All lanes of a warp together.
    Vote(Vote),
    Shuffle,
    Barrier,
    /// All warps of a block together.
    BlockBarrier,
}

impl What {
    pub fn is_sync(self) -> bool {
        matches!(self, Self::Vote(_) | Self::Shuffle | Self::Barrier | Self::BlockBarrier)
    }
}

pub struct Instruction {
    /// A predicate, and what it must be.
    pub guard: Option<(usize, bool)>,
    pub what: What,
    /// Of the type that it names; of two the narrower.
    pub bits: u32,
    /// It names memory of its block.
    pub is_shared: bool,
    pub operands: Vec<Operand>,
    pub text: String,
}

/// A text with one global variable or none, one that is shared by a block, and one entry.
pub struct Program {
    pub registers: usize,
    pub instructions: Vec<Instruction>,
}

/// The text between two marks.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let rest = text.split_once(from).unwrap_or_else(|| panic!("no {from:?}")).1;
    rest.split_once(to).unwrap_or_else(|| panic!("no {to:?}")).0
}

/// Splits at commas that no bracket holds.
fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut all, mut begin) = (0, Vec::new(), 0);
    for (i, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                all.push(text[begin..i].trim());
                begin = i + 1;
            }
            _ => {}
        }
    }
    all.push(text[begin..].trim());
    all.retain(|part| !part.is_empty());
    all
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The names of a declaration; `a<3>` is a0, a1, a2.
fn declared(list: &str) -> Vec<String> {
    let names = |name: &str| match name.split_once('<') {
        None => vec![name.to_string()],
        Some((stem, count)) => {
            let count: usize = count.trim_end_matches('>').parse().unwrap();
            (0..count).map(|i| format!("{stem}{i}")).collect()
        }
    };
    split(list).into_iter().flat_map(names).collect()
}

impl Program {
    /// `variable`: the address of the global variable. That of a block is at 0.
    pub fn parse(text: &str, variable: u64) -> Self {
        let text: String = text.lines().map(|l| format!("{}\n", l.split("//").next().unwrap_or(""))).collect();
        let global = text.lines().find(|l| l.starts_with(".global"));
        let symbol = global.map(|l| between(l, ".b8", "[").trim());
        let entry = text.split_once(".entry").expect("an entry").1;
        let parameters: Vec<&str> =
            split(between(entry, "(", ")")).into_iter().map(|p| p.split_whitespace().last().unwrap()).collect();
        let body = between(entry, "\n{", "\n}");
        let (mut registers, mut labels, mut statements) = (HashMap::new(), HashMap::new(), Vec::new());
        let mut shared = None;
        for mut statement in body.split(';').map(str::trim) {
            while let Some((label, rest)) = statement.split_once(':') {
                assert!(labels.insert(label.to_string(), statements.len()).is_none(), "{label} twice");
                statement = rest.trim();
            }
            if let Some(declaration) = statement.strip_prefix(".reg") {
                for name in declared(declaration.trim().split_once(' ').expect("a type").1) {
                    let next = registers.len();
                    assert!(registers.insert(name, next).is_none(), "twice: {declaration}");
                }
            } else if statement.starts_with(".shared") {
                shared = Some(between(statement, ".b8", "[").trim());
            } else if !statement.is_empty() {
                statements.push(statement);
            }
        }
        let operand = |text: &str| {
            let register = |name: &str| *registers.get(name.trim()).unwrap_or_else(|| panic!("what is {name}?"));
            if let Some(inner) = text.strip_prefix('{') {
                return Operand::Group(split(inner.trim_end_matches('}')).into_iter().map(register).collect());
            }
            if let Some(inner) = text.strip_prefix('[') {
                let inner = inner.trim_end_matches(']');
                let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
                return Operand::At(register(base), number(offset).expect("an offset"));
            }
            match text {
                "%tid.x" => Operand::Thread,
                "%ctaid.x" => Operand::Block,
                "%ntid.x" => Operand::Threads,
                "%globaltimer" => Operand::Timer,
                _ if symbol == Some(text) => Operand::Value(variable),
                _ if shared == Some(text) => Operand::Value(0),
                _ => number(text).map_or_else(|| Operand::Reg(register(text)), Operand::Value),
            }
        };
        let instruction = |text: &&str| {
            let (guard, rest) = match text.strip_prefix('@') {
                None => (None, *text),
                Some(guarded) => {
                    let (name, rest) = guarded.split_once(' ').expect("an instruction");
                    let wanted = !name.starts_with('!');
                    (Some((registers[name.trim_start_matches('!')], wanted)), rest.trim())
                }
            };
            let (name, list) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let list = split(list.trim());
            let parts: Vec<&str> = name.split('.').collect();
            let (what, operands): (_, Vec<Operand>) = match name {
                "bra" => (What::Branch(labels[list[0]]), Vec::new()),
                "ld.param.u64" => {
                    let parameter = list[1].trim_matches(['[', ']']);
                    let at = parameters.iter().position(|p| *p == parameter).expect("a parameter");
                    (What::Param(at), vec![operand(list[0])])
                }
                _ => (what(name, &parts), list.into_iter().map(operand).collect()),
            };
            let bits_of = |part: &&str| match *part {
                "pred" => Some(1),
                other => other.strip_prefix(['b', 'u']).and_then(|n| n.parse().ok()),
            };
            // Where there are two, as in setp and cvt, none is wider than what is kept.
            let bits = parts[1..].iter().filter_map(bits_of).min().unwrap_or(0);
            let is_shared = parts.contains(&"shared");
            Instruction { guard, what, bits, is_shared, operands, text: text.to_string() }
        };
        let instructions = statements.iter().map(instruction).collect();
        Self { registers: registers.len(), instructions }
    }
}

/// All but branches and parameters.
fn what(name: &str, parts: &[&str]) -> What {
    let has = |part: &str| parts.contains(&part);
    match parts[0] {
        "add" => What::Compute(|a, b, _| a.wrapping_add(b)),
        "sub" => What::Compute(|a, b, _| a.wrapping_sub(b)),
        "and" => What::Compute(|a, b, _| a & b),
        "or" => What::Compute(|a, b, _| a | b),
        "xor" => What::Compute(|a, b, _| a ^ b),
        "min" => What::Compute(|a, b, _| a.min(b)),
        "mul" if has("lo") || has("wide") => What::Compute(|a, b, _| a.wrapping_mul(b)),
        // Everything is shifted out by too much.
        "shl" => What::Compute(|a, b, bits| if b < u64::from(bits) { a << b } else { 0 }),
        "shr" => What::Compute(|a, b, bits| if b < u64::from(bits) { a >> b } else { 0 }),
        "not" => What::Not,
        "brev" => What::Reverse,
        "clz" => What::LeadingZeros,
        "popc" => What::Count,
        "mov" | "cvt" => What::Move,
        "setp" => What::Compare(match parts[1] {
            "eq" => |a, b| a == b,
            "ne" => |a, b| a != b,
            "lt" => |a, b| a < b,
            "le" => |a, b| a <= b,
            "gt" => |a, b| a > b,
            "ge" => |a, b| a >= b,
            _ => panic!("{name}"),
        }),
        "prmt" => What::Permute,
        "ld" if has("shared") => What::Load(Strength { acquires: has("acquire"), all: false }),
        "ld" if has("volatile") || has("relaxed") || has("acquire") => {
            What::Load(Strength { acquires: has("acquire"), all: has("volatile") || has("sys") })
        }
        "st" if has("release") => What::Release,
        "st" => What::Store { strong: has("volatile") || has("relaxed") },
        "red" if has("add") && has("shared") => What::SharedAdd { releases: has("release") },
        "red" if has("add") => What::Add,
        "atom" if has("cas") && has("shared") => What::SharedExchange { acquires: has("acquire") },
        "atom" if has("add") => What::FetchAdd,
        "fence" if has("acq_rel") => What::Fence { all: has("sys") },
        "nanosleep" => What::Sleep,
        "ret" => What::Return,
        "vote" if has("ballot") => What::Vote(Vote::Ballot),
        "vote" if has("any") => What::Vote(Vote::Any),
        "vote" if has("all") => What::Vote(Vote::All),
        "shfl" if has("idx") => What::Shuffle,
        "bar" if name == "bar.warp.sync" => What::Barrier,
        "bar" if name == "bar.sync" => What::BlockBarrier,
        _ => panic!("{name} is not known here"),
    }
}
