//! The screen of `oxygin top`: a line for each communicator, a line for each (context, peer). 80 columns are enough.

use super::rates::{Look, Moving};
use crate::stats::text::{count, peer, program, state, time, way};
use oxygin::telemetry::stats::layout::{State, Way};
use oxygin::telemetry::stats::read::Set;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row, Table};
use ratatui::Frame;

/// What is on the screen.
#[derive(Default)]
pub struct View {
    look: Look,
    /// What went wrong at the last look.
    error: Option<String>,
    /// Lines of the lower table that are above its window.
    above: usize,
}

impl View {
    /// There is news.
    pub fn show(&mut self, look: Look) {
        self.look = look;
        self.scroll(0);
    }

    /// What went wrong at the last look, if anything did.
    pub fn say(&mut self, error: Option<String>) {
        self.error = error;
    }

    /// Moves the lower table.
    pub fn scroll(&mut self, lines: isize) {
        self.above = self.above.saturating_add_signed(lines).min(self.look.lanes.len().saturating_sub(1));
    }

    /// Draws everything.
    pub fn draw(&self, frame: &mut Frame) {
        let area = frame.area();
        let foot_lines = 1 + u16::from(self.error.is_some());
        let room = area.height.saturating_sub(4 + foot_lines) / 2;
        let sets = (self.look.sets.len() as u16).clamp(1, room.max(1));
        let parts =
            [Constraint::Length(1), Constraint::Length(sets + 1), Constraint::Min(2), Constraint::Length(foot_lines)];
        let [title, upper, lower, foot] = Layout::vertical(parts).areas(area);
        frame.render_widget(self.title(), title);
        self.draw_sets(frame, upper);
        self.draw_lanes(frame, lower);
        let has_companions = self.look.lanes.iter().any(|m| m.lane.is_companion);
        let marks = if has_companions { ", c: its companion for counters" } else { "" };
        let keys = format!("q quits, arrows scroll; {} (context, peer){marks}", self.look.lanes.len());
        let error = self.error.iter().map(|error| Line::styled(error.clone(), Style::new().fg(Color::Red)));
        frame.render_widget(Text::from_iter(error.chain([Line::from(keys)])), foot);
    }

    fn title(&self) -> Line<'static> {
        let rate: f64 = self.look.lanes.iter().map(Moving::operations).sum();
        let bytes: f64 = self.look.lanes.iter().map(|m| m.bytes).sum();
        let sum = |of: fn(&Moving) -> u64| self.look.lanes.iter().map(of).sum::<u64>();
        let text = format!(
            "oxygin top: {} sets, {}/s, {}B/s, {} under way, {} refused, {} dropped",
            self.look.sets.len(),
            count(rate as u64),
            count(bytes as u64),
            count(sum(|m| m.lane.under_way)),
            count(sum(|m| m.lane.refused)),
            count(sum(|m| m.lane.dropped)),
        );
        Line::styled(text, Style::new().add_modifier(Modifier::BOLD))
    }

    fn draw_sets(&self, frame: &mut Frame, area: Rect) {
        let rows = self.look.sets.iter().enumerate().map(|(number, s)| {
            let of_set = || self.look.lanes.iter().filter(move |m| m.set == number);
            let rate: f64 = of_set().map(Moving::operations).sum();
            let oldest = of_set().filter_map(|m| m.lane.oldest).max();
            let errors: u64 = of_set().map(|m| m.lane.refused + m.lane.dropped).sum();
            let row = Row::new([
                s.pid.to_string(),
                program(s.pid),
                format!("{}.{}", s.comm, s.set),
                format!("{}/{}", s.rank, s.nranks),
                s.fabric.clone(),
                way(s.way).into(),
                s.contexts.to_string(),
                format!("{}/s", count(rate as u64)),
                count(of_set().map(|m| m.lane.under_way).sum()),
                oldest.map_or("-".into(), time),
                count(errors),
            ]);
            row.style(colour(errors > 0, is_late(s, oldest)))
        });
        let widths = [7, 8, 5, 6, 6, 6, 4, 8, 6, 7, 6].map(Constraint::Length);
        let head = ["PID", "PROGRAM", "COMM", "RANK", "FABRIC", "BY", "CTXS", "RATE", "OPEN", "OLDEST", "ERRORS"];
        frame.render_widget(table(rows, widths, head), area);
    }

    fn draw_lanes(&self, frame: &mut Frame, area: Rect) {
        let rows = self.look.lanes.iter().skip(self.above).map(|m| {
            let (l, s) = (&m.lane, &self.look.sets[m.set]);
            let engine = s.way == Way::Engine;
            let only = |text: String| if engine { text } else { "-".into() };
            let row = Row::new([
                s.pid.to_string(),
                format!("{}.{}", s.comm, s.set),
                l.context.to_string(),
                peer(l),
                count(l.entries),
                format!("{}/s", count(m.entries as u64)),
                format!("{}B/s", count(m.bytes as u64)),
                count(l.under_way),
                l.oldest.map_or("-".into(), time),
                l.complete.quantile(0.99).map_or("-".into(), time),
                only(state(l.state).into()),
            ]);
            row.style(colour(matches!(l.state, State::Failed | State::Stopped), is_late(s, l.oldest)))
        });
        let widths = [7, 5, 4, 4, 6, 8, 9, 6, 7, 7, 7].map(Constraint::Length);
        let head = ["PID", "COMM", "CTX", "PEER", "TOTAL", "RATE", "BYTES", "OPEN", "OLDEST", "P99<", "STATE"];
        frame.render_widget(table(rows, widths, head), area);
    }
}

fn table<'a, const N: usize>(
    rows: impl Iterator<Item = Row<'a>>,
    widths: [Constraint; N],
    head: [&'static str; N],
) -> Table<'a> {
    let head = Row::new(head.map(Cell::from)).style(Style::new().add_modifier(Modifier::REVERSED));
    // What does not fit is cut at the right.
    Table::new(rows, widths).header(head).column_spacing(1)
}

/// Whether the oldest entry is older than `OXYGIN_STALL`.
fn is_late(set: &Set, oldest: Option<u64>) -> bool {
    set.stall > 0 && oldest.is_some_and(|age| age >= set.stall)
}

fn colour(has_errors: bool, is_late: bool) -> Style {
    match (has_errors, is_late) {
        (true, _) => Style::new().fg(Color::Red),
        (_, true) => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    }
}
