//! What the doctor found, and how it is written down.

use serde::Serialize;
use std::fmt::Write;

/// How a finding bears on oxygin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Works, would be used.
    Ok,
    /// Worth knowing.
    Note,
    /// Not there or not used; oxygin runs without it.
    No,
    /// The user asked for it and it cannot work, or nothing works without it.
    Wrong,
}

/// One thing looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub subject: String,
    /// How it bears on oxygin.
    pub verdict: Verdict,
    /// What was seen.
    pub detail: String,
    /// What would change it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Findings of one kind.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// Heading.
    pub title: &'static str,
    /// In the order they were made.
    pub findings: Vec<Finding>,
}

impl Section {
    /// An empty section.
    pub fn new(title: &'static str) -> Self {
        Self { title, findings: Vec::new() }
    }

    fn add(&mut self, verdict: Verdict, subject: impl Into<String>, detail: impl Into<String>, remedy: Option<String>) {
        self.findings.push(Finding { subject: subject.into(), verdict, detail: detail.into(), remedy });
    }

    /// Something that works.
    pub fn ok(&mut self, subject: impl Into<String>, detail: impl Into<String>) {
        self.add(Verdict::Ok, subject, detail, None);
    }

    /// Something worth knowing.
    pub fn note(&mut self, subject: impl Into<String>, detail: impl Into<String>) {
        self.add(Verdict::Note, subject, detail, None);
    }

    /// Something that is not used, and what would change that.
    pub fn no(&mut self, subject: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) {
        self.add(Verdict::No, subject, detail, Some(remedy.into()));
    }

    /// Something that was asked for and cannot work.
    pub fn wrong(&mut self, subject: impl Into<String>, detail: impl Into<String>, remedy: impl Into<String>) {
        self.add(Verdict::Wrong, subject, detail, Some(remedy.into()));
    }
}

/// Everything found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// oxygin can run here and nothing that was asked for is impossible.
    pub healthy: bool,
    /// The findings by kind.
    pub sections: Vec<Section>,
}

impl Report {
    /// Sums up.
    pub fn new(sections: Vec<Section>) -> Self {
        let healthy = sections.iter().flat_map(|s| &s.findings).all(|f| f.verdict != Verdict::Wrong);
        Self { healthy, sections }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = String::new();
        for section in &self.sections {
            let _ = writeln!(out, "{}", section.title);
            for Finding { subject, verdict, detail, remedy } in &section.findings {
                let mark = match verdict {
                    Verdict::Ok => "ok   ",
                    Verdict::Note => "     ",
                    Verdict::No => "no   ",
                    Verdict::Wrong => "WRONG",
                };
                let _ = writeln!(out, "  {mark}  {subject}: {detail}");
                if let Some(remedy) = remedy {
                    let _ = writeln!(out, "         -> {remedy}");
                }
            }
            out.push('\n');
        }
        let wrong = self.sections.iter().flat_map(|s| &s.findings).filter(|f| f.verdict == Verdict::Wrong).count();
        let _ = match wrong {
            0 => writeln!(out, "oxygin can run on this machine."),
            n => writeln!(out, "{n} thing{} marked WRONG above.", if n == 1 { " is" } else { "s are" }),
        };
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_finding_makes_the_report_unhealthy_and_shows_its_remedy() {
        let mut section = Section::new("Network");
        section.no("verbs", "no devices", "load the driver");
        assert!(Report::new(vec![section.clone()]).healthy);
        section.wrong("NCCL_SOCKET_IFNAME", "matches nothing", "unset it");
        let report = Report::new(vec![section]);
        assert!(!report.healthy);
        assert!(report.text().contains("WRONG  NCCL_SOCKET_IFNAME: matches nothing\n         -> unset it"));
    }
}
