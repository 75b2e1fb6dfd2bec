//! Types written by hand against what a C compiler makes of the header that they come from.

use std::collections::BTreeMap;
use std::process::Command;

macro_rules! sizes {
    ($out:ident, $($name:ident),* $(,)?) => {
        $($out.push((format!("sizeof(struct {})", stringify!($name)), size_of::<$name>() as u64));)*
    };
}

macro_rules! offsets {
    ($out:ident, $($name:ident { $($field:ident),* $(,)? })*) => {
        $($($out.push((
            format!("offsetof(struct {}, {})", stringify!($name), stringify!($field)),
            offset_of!($name, $field) as u64,
        ));)*)*
    };
}

macro_rules! values {
    ($out:ident, $($name:ident),* $(,)?) => {
        $($out.push((stringify!($name).to_owned(), $name as u64));)*
    };
}

pub(crate) use {offsets, sizes, values};

/// Compares C expressions with what they are here. `header` comes from `package`; `name` is of no other test.
pub fn compare(name: &str, header: &str, package: &str, expected: &[(String, u64)]) {
    let mut source = format!("#include <stddef.h>\n#include <stdio.h>\n#include <{header}>\nint main(void) {{\n");
    for (what, _) in expected {
        source += &format!("  printf(\"%s=%llu\\n\", \"{what}\", (unsigned long long)({what}));\n");
    }
    source += "  return 0;\n}\n";
    let dir = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (c, exe) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&c, source).unwrap();
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(&cc).arg("-o").arg(&exe).arg(&c).output().expect("a C compiler is needed");
    assert!(built.status.success(), "{cc} failed; is {package} installed?\n{}", String::from_utf8_lossy(&built.stderr));
    let ran = Command::new(&exe).output().unwrap();
    let said: BTreeMap<_, _> = std::str::from_utf8(&ran.stdout)
        .unwrap()
        .lines()
        .map(|l| l.rsplit_once('=').map(|(k, v)| (k.to_owned(), v.parse::<u64>().unwrap())).unwrap())
        .collect();
    let wrong: Vec<_> = expected
        .iter()
        .filter(|(k, v)| said.get(k) != Some(v))
        .map(|(k, v)| format!("{k}: here {v}, in C {:?}", said.get(k)))
        .collect();
    assert_eq!(said.len(), expected.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
