//! `pliant run` and `pliant supervise` without the rest of `pliant`, for tests by hand.
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let code = match args.next().as_deref() {
        Some("supervise") => pliant_launcher::supervise(),
        _ => {
            let mut label = false;
            let command = args
                .skip_while(|a| {
                    label |= a == "--label";
                    a != "--"
                })
                .skip(1)
                .collect();
            pliant_launcher::run(pliant_launcher::RunOptions { label, command })
        }
    };
    ExitCode::from(code)
}
