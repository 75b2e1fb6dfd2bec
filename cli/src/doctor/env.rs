//! The variables that are set, and what is wrong with them.

use super::report::Section;
use oxygin::config::{self, Config, VARIABLES};

/// Looks at variables; `all` is the environment.
pub fn variables(all: &[(String, String)]) -> (Config, Section) {
    let mut section = Section::new("Variables");
    let value = |name: &str| all.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let (config, problems) = Config::parse(value);
    let wrong: Vec<_> =
        problems.iter().map(|problem| problem.split_once('=').unwrap_or(("variable", problem))).collect();
    for (name, detail) in &wrong {
        section.wrong(*name, *detail, "correct it or unset it");
    }
    for (name, text) in all {
        if let Some(complaint) = config::unknown(name) {
            // OXYGIN_PLUGIN belongs to the tools.
            if name != "OXYGIN_PLUGIN" {
                section.wrong(name, complaint, "correct its name or unset it");
            }
        } else if VARIABLES.iter().any(|v| v.name == name) {
            // What cannot be used has its line above, and an empty value is none.
            if !text.is_empty() && wrong.iter().all(|(subject, _)| subject != name) {
                section.ok(name, text);
            }
        } else if name.starts_with("NCCL_") {
            section.note(name, format!("{text}: read by NCCL, not by oxygin"));
        }
    }
    let unset: Vec<String> = VARIABLES
        .iter()
        .filter(|v| value(v.name).is_none_or(|text| text.is_empty()))
        .map(|v| format!("{} ({})", v.name, v.default))
        .collect();
    section.note("unset, with their defaults", unset.join(", "));
    (config, section)
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    fn verdicts(all: &[(&str, &str)]) -> Vec<(String, Verdict)> {
        let all: Vec<_> = all.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        let section = variables(&all).1;
        section
            .findings
            .into_iter()
            .filter(|f| !f.subject.starts_with("unset"))
            .map(|f| (f.subject, f.verdict))
            .collect()
    }

    #[test]
    fn misspelt_names_and_values_are_wrong_and_foreign_ones_only_noted() {
        assert_eq!(verdicts(&[("OXYGIN_FABRIC", "soft")]), [("OXYGIN_FABRIC".into(), Verdict::Ok)]);
        assert_eq!(verdicts(&[("OXYGIN_FABRIK", "soft")]), [("OXYGIN_FABRIK".into(), Verdict::Wrong)]);
        assert_eq!(verdicts(&[("NCCL_ALGO", "ring")]), [("NCCL_ALGO".into(), Verdict::Note)]);
        assert_eq!(verdicts(&[("OXYGIN_FABRIC", "sofd")]), [("OXYGIN_FABRIC".into(), Verdict::Wrong)]);
        assert_eq!(verdicts(&[("OXYGIN_FABRIC", "")]), []);
    }
}
