//! What operands stand for, and what instructions make of registers alone.

use super::program::{Instruction, Operand, What};
use super::{Few, Lane, Machine};

/// The low bits of a value.
pub fn mask(v: u64, bits: u32) -> u64 {
    if bits >= 64 {
        v
    } else {
        v & ((1 << bits) - 1)
    }
}

/// The registers that an instruction sets.
pub fn targets(operand: &Operand) -> Few<usize> {
    match operand {
        Operand::Reg(r) => std::iter::once(*r).collect(),
        Operand::Group(all) => all.iter().copied().collect(),
        other => panic!("{other:?} is no target"),
    }
}

impl Machine {
    pub(super) fn value(&self, lane: &Lane, block: u64, operand: &Operand) -> u64 {
        match operand {
            Operand::Reg(r) => lane.registers[*r],
            Operand::Value(v) => *v,
            Operand::Group(halves) => {
                assert!(halves.len() == 2);
                lane.registers[halves[0]] & 0xffff_ffff | lane.registers[halves[1]] << 32
            }
            Operand::At(r, offset) => lane.registers[*r].wrapping_add(*offset),
            Operand::Thread => lane.thread,
            Operand::Block => block,
            Operand::Threads => self.threads,
            Operand::Timer => self.turns,
        }
    }

    /// The registers that an instruction sets without touching memory, and to what.
    pub(super) fn computed(&self, lane: &Lane, block: u64, instruction: &Instruction) -> Few<(usize, u64)> {
        let (bits, operands) = (instruction.bits, &instruction.operands);
        let v = |i: usize| self.value(lane, block, &operands[i]);
        let mask = |v: u64| mask(v, bits);
        let value = match instruction.what {
            What::Param(i) => self.parameters[i],
            What::Compute(f) => mask(f(mask(v(1)), v(2), bits)),
            What::Not => mask(!v(1)),
            What::Reverse => mask(v(1)).reverse_bits() >> (64 - bits),
            What::LeadingZeros => u64::from(mask(v(1)).leading_zeros() + bits - 64),
            What::Count => u64::from(mask(v(1)).count_ones()),
            What::Move => match &operands[0] {
                Operand::Group(halves) => {
                    return [(halves[0], v(1) & 0xffff_ffff), (halves[1], v(1) >> 32)].into_iter().collect();
                }
                _ => mask(v(1)),
            },
            What::Compare(f) => u64::from(f(mask(v(1)), mask(v(2)))),
            What::Permute => {
                let both = mask(v(1)) | v(2) << 32;
                let byte = |i: u64| (both >> (8 * (v(3) >> (4 * i) & 7)) & 0xff) << (8 * i);
                (0..4).map(byte).sum()
            }
            other => unreachable!("{other:?} computes nothing"),
        };
        std::iter::once((targets(&operands[0])[0], value)).collect()
    }
}
