//! A command that is torchrun: one process per node starts the ranks there, and its world comes from us in `PET_*`
//! variables. Flags that would say otherwise are taken out of its command line. Pure.

/// Flags about the world, with a value unless noted.
const WORLD: [&str; 10] = [
    "nnodes",
    "nproc-per-node",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "local-addr",
];
/// Flags without a value.
const SWITCHES: [&str; 5] = ["standalone", "no-python", "run-path", "use-env", "help"];
/// The one of them that is about the world.
const STANDALONE: &str = "standalone";

/// A command, looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Looked {
    /// The command to start.
    pub command: Vec<String>,
    /// Whether it is torchrun.
    pub torchrun: bool,
    /// World flags that were taken out, as typed.
    pub stripped: Vec<String>,
}

/// Looks at a command.
pub fn look(command: &[String]) -> Looked {
    let plain = || Looked { command: command.to_vec(), torchrun: false, stripped: vec![] };
    let Some(flags_at) = flags_of_torchrun(command) else { return plain() };
    let (head, rest) = command.split_at(flags_at);
    let mut out = head.to_vec();
    let mut stripped = vec![];
    let mut words = rest.iter().peekable();
    while let Some(word) = words.next() {
        let Some(flag) = word.strip_prefix("--").filter(|f| !f.is_empty()) else {
            if !word.starts_with('-') || word == "--" {
                // The script: what follows is its own.
                out.push(word.clone());
                break;
            }
            // -m MODULE ends the flags, -r/-t have a value.
            out.push(word.clone());
            if word == "-m" {
                break;
            }
            if word.len() == 2 {
                out.extend(words.next().cloned());
            }
            continue;
        };
        let (name, inline) = match flag.split_once('=') {
            Some((name, _)) => (name.replace('_', "-"), true),
            None => (flag.replace('_', "-"), false),
        };
        let world = WORLD.contains(&name.as_str()) || name == STANDALONE;
        let valued = !inline && !SWITCHES.contains(&name.as_str()) && name != "module";
        let mut taken = vec![word.clone()];
        if valued {
            taken.extend(words.next().cloned());
        }
        if world {
            stripped.push(taken.join(" "));
        } else {
            out.extend(taken);
            if name == "module" {
                break;
            }
        }
    }
    out.extend(words.cloned());
    Looked { command: out, torchrun: true, stripped }
}

fn base_name(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

/// Where torchrun's own flags begin; `None`: the command is something else.
fn flags_of_torchrun(command: &[String]) -> Option<usize> {
    let first = base_name(command.first()?);
    if first == "torchrun" {
        return Some(1);
    }
    if !first.starts_with("python") && !first.starts_with("pypy") {
        return None;
    }
    let mut at = 1;
    while let Some(word) = command.get(at) {
        match word.as_str() {
            "-m" => {
                let module = command.get(at + 1)?;
                let ours = ["torch.distributed.run", "torch.distributed.launch"].contains(&module.as_str());
                return ours.then_some(at + 2);
            }
            "-W" | "-X" => at += 2,
            flag if flag.starts_with('-') && flag != "-c" => at += 1,
            _ => return None,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn world_flags_are_taken_out_and_nothing_else() {
        for (typed, kept, stripped) in [
            ("torchrun train.py --nnodes=3", "torchrun train.py --nnodes=3", 0),
            ("torchrun --nnodes=1:4 --nproc_per_node 8 --rdzv-backend c10d t.py a", "torchrun t.py a", 3),
            (
                "/x/bin/torchrun --standalone --max-restarts 3 -m pkg.train --nnodes 2",
                "/x/bin/torchrun --max-restarts 3 -m pkg.train --nnodes 2",
                1,
            ),
            (
                "python3 -u -m torch.distributed.run --master_port=1 --log-dir d t.py",
                "python3 -u -m torch.distributed.run --log-dir d t.py",
                1,
            ),
            (
                "torchrun --no-python --tee 3 ./prog --node-rank 1",
                "torchrun --no-python --tee 3 ./prog --node-rank 1",
                0,
            ),
            ("torchrun -t 3 --node_rank=0 t.py", "torchrun -t 3 t.py", 1),
        ] {
            let looked = look(&words(typed));
            assert!(looked.torchrun, "{typed}");
            assert_eq!(looked.command.join(" "), kept);
            assert_eq!(looked.stripped.len(), stripped, "{typed}");
        }
    }

    #[test]
    fn other_commands_stay_as_they_are() {
        for typed in [
            "python train.py --nnodes=2",
            "python -c x -m torch.distributed.run",
            "./torchrun.sh",
            "python -m mine",
            "bash",
        ] {
            let looked = look(&words(typed));
            assert!(!looked.torchrun, "{typed}");
            assert_eq!(looked.command, words(typed));
        }
        assert!(!look(&[]).torchrun);
    }
}
