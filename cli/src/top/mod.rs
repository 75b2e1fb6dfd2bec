//! `oxygin top`: the communicators of running processes and their busiest (context, peer), on a terminal.

mod rates;
mod screen;
mod view;

use crate::ending::Ending;
use crate::stats;
use nix::sys::signal::Signal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use rates::Rates;
use screen::Screen;
use std::error::Error;
use std::io::{stdin, stdout, IsTerminal};
use std::time::{Duration, Instant};

/// Options of `oxygin top`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Processes; none: all that have statistics and may be read
    #[arg(value_name = "PID")]
    pids: Vec<u32>,
    /// Seconds between two looks
    #[arg(short, long, default_value_t = 1.0, value_parser = interval)]
    interval: f64,
}

fn interval(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    (0.1..=3600.0).contains(&value).then_some(value).ok_or_else(|| "0.1 to 3600 seconds".into())
}

/// Runs it until `q`, or as long as there is a terminal.
pub fn run(args: Args) -> Result<Ending, Box<dyn Error>> {
    if !stdin().is_terminal() || !stdout().is_terminal() {
        return Err("top needs a terminal on its input and output; `oxygin stats` prints the same numbers once".into());
    }
    // Where nothing of what was asked for can be read, that is said before the screen is taken.
    let found = stats::read(&args.pids);
    let obstacles = found.obstacles();
    if !args.pids.is_empty() && !obstacles.is_empty() && found.sets.is_empty() && found.without.is_empty() {
        return Err(obstacles.join("; ").into());
    }
    let mut screen = Screen::take()?;
    let outcome = watch(&mut screen, &args);
    // Also after an error: the terminal is the user's.
    let given_back = screen.give_back();
    if screen::has_gone() {
        // What it was used for failed. The signal may come later, or is ignored.
        return Ok(Ending::Stopped(Signal::SIGHUP));
    }
    given_back?;
    outcome.map(|()| Ending::Well)
}

fn watch(screen: &mut Screen, args: &Args) -> Result<(), Box<dyn Error>> {
    let every = Duration::from_secs_f64(args.interval);
    let (mut rates, mut view) = (Rates::default(), view::View::default());
    loop {
        let looked = Instant::now();
        // A process that has ended is said so; the others go on, and the last one's numbers stay.
        let found = stats::read(&args.pids);
        let obstacle = found.obstacles().into_iter().next();
        if found.unreadable.is_empty() || found.unreadable.len() < args.pids.len() {
            view.show(rates.update(found.sets));
        }
        view.say(obstacle);
        loop {
            screen.draw(&view)?;
            let left = every.saturating_sub(looked.elapsed());
            if left.is_zero() || !event::poll(left)? {
                break;
            }
            let Event::Key(key) = event::read()? else { continue };
            if key.kind != KeyEventKind::Press {
                continue;
            }
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
                KeyCode::Down | KeyCode::Char('j') => view.scroll(1),
                KeyCode::Up | KeyCode::Char('k') => view.scroll(-1),
                KeyCode::PageDown | KeyCode::Char(' ') => view.scroll(10),
                KeyCode::PageUp => view.scroll(-10),
                _ => {}
            }
        }
    }
}
