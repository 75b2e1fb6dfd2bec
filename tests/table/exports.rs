//! What the shipped library shows to the dynamic linker, and what it asks of it.

use crate::support::release;
use object::elf::{DT_NEEDED, STB_GLOBAL, STB_WEAK};
use object::read::elf::{Dyn, ElfFile64};
use object::{Endianness, Object, ObjectSymbol, SymbolFlags};
use std::collections::BTreeSet;

const TABLES: [&str; 8] = [
    "ncclGinPlugin_v11",
    "ncclGinPlugin_v12",
    "ncclGinPlugin_v13",
    "ncclGinPlugin_v14",
    "ncclRmaPlugin_v13",
    "ncclRmaPlugin_v14",
    "ncclRmaPlugin_v15",
    "ncclRmaPlugin_v16",
];

#[test]
fn the_tables_and_nothing_else_are_exported() {
    let bytes = std::fs::read(release::library()).expect("the library that was just built");
    let elf = ElfFile64::<Endianness>::parse(bytes.as_slice()).expect("an ELF file");
    let exported: BTreeSet<&str> = elf
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition())
        .filter(|symbol| match symbol.flags() {
            SymbolFlags::Elf { st_info, .. } => matches!(st_info >> 4, STB_GLOBAL | STB_WEAK),
            _ => true,
        })
        .map(|symbol| symbol.name().expect("a name"))
        .filter(|name| !name.starts_with("oxygin_"))
        .collect();
    assert_eq!(exported, BTreeSet::from(TABLES));
}

/// Above all: no libibverbs, no libmlx5, no libcuda. They are looked for at run time.
#[test]
fn only_the_c_library_is_needed() {
    let bytes = std::fs::read(release::library()).expect("the library that was just built");
    let elf = ElfFile64::<Endianness>::parse(bytes.as_slice()).expect("an ELF file");
    let endian = elf.endian();
    let sections = elf.elf_section_table();
    let (entries, link) = sections.dynamic(endian, elf.data()).expect("readable").expect("a dynamic section");
    let strings = sections.strings(endian, elf.data(), link).expect("its strings");
    let needed: Vec<String> = entries
        .iter()
        .filter(|entry| entry.tag32(endian) == Some(DT_NEEDED))
        .map(|entry| String::from_utf8_lossy(entry.string(endian, strings).expect("a name")).into_owned())
        .collect();
    assert!(needed.iter().any(|name| name == "libc.so.6"), "{needed:?}");
    for name in &needed {
        let stem = name.split(".so").next().unwrap_or(name);
        assert!(
            ["libc", "libgcc_s", "libm", "ld-linux-x86-64", "ld-linux-aarch64"].contains(&stem),
            "{name} is needed, of {needed:?}"
        );
    }
}
