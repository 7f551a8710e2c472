//! `./dev bench NAME`: figures beside their limits, as JSON lines; exits with 1 when one is short.
#![forbid(unsafe_code)]

mod agent;
mod daemon;
mod events;
mod links;
mod placement;
mod report;
mod resize;
mod select;
mod spank;

use report::Report;
use std::process::ExitCode;

type Bench = fn(&mut Report) -> anyhow::Result<()>;

const BENCHES: &[(&str, Bench)] = &[
    ("resize", resize::run),
    ("spank", spank::run),
    ("daemon", daemon::run),
    ("placement", placement::run),
    ("agent", agent::run),
    ("select", select::run),
    ("soak", select::soak),
    ("links", links::run),
    ("events", events::run),
];

fn main() -> ExitCode {
    let asked = std::env::args().nth(1).unwrap_or_default();
    let Some((name, bench)) = BENCHES.iter().find(|(name, _)| *name == asked) else {
        let names: Vec<&str> = BENCHES.iter().map(|(name, _)| *name).collect();
        eprintln!("bench: '{asked}' is none of {}", names.join(", "));
        return ExitCode::from(2);
    };
    let mut report = Report::new(name);
    match bench(&mut report) {
        Ok(()) if report.ok() => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("bench {name}: {e:?}");
            ExitCode::FAILURE
        }
    }
}
