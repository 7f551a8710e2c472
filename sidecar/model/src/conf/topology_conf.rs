//! topology.conf: a tree of switches, or blocks.

use super::{ConfError, Entry, Read, entries};
use crate::hostlist;
use crate::ids::NodeName;
use crate::topology::{Switch, SwitchError, SwitchKind, Switches};

/// Reads topology.conf and checks it as a whole.
///
/// # Errors
/// With file, line and reason: duplicates, unknown switches, circles, two parents, blocks that are not there.
pub fn parse(file: &str, text: &str, read: Read<'_>) -> Result<Switches, ConfError> {
    let mut all = Switches::default();
    let mut gaps = vec![];
    for entry in entries(file, text, read, &mut gaps)? {
        add(&mut all, &entry)?;
    }
    if let Some(gap) = gaps.first() {
        return Err(ConfError::new(file, 0, format!("not whole: {gap}")));
    }
    checked(file, all)
}

/// Switches that pass [`Switches::check`].
pub(super) fn checked(file: &str, all: Switches) -> Result<Switches, ConfError> {
    match all.check() {
        Ok(()) => Ok(all),
        Err(e) => {
            let line = match &e {
                SwitchError::Duplicate { line, .. }
                | SwitchError::UnknownChild { line, .. }
                | SwitchError::Cycle { line, .. }
                | SwitchError::TwoParents { line, .. }
                | SwitchError::Empty { line, .. } => *line,
                SwitchError::Blocks(_) => 0,
            };
            let text = e.to_string();
            let reason = text.strip_prefix(&format!("line {line}: ")).unwrap_or(&text);
            Err(ConfError::new(file, line, reason))
        }
    }
}

fn add(all: &mut Switches, entry: &Entry) -> Result<(), ConfError> {
    const KEYS: [&str; 6] = ["SwitchName", "Switches", "Nodes", "LinkSpeed", "BlockName", "BlockSizes"];
    if let Some(word) = entry.words.iter().find(|w| !KEYS.iter().any(|k| w.key.eq_ignore_ascii_case(k))) {
        return Err(entry.error(format!("{} is no key of topology.conf ({})", word.key, KEYS.join(", "))));
    }
    if let Some(sizes) = entry.get("BlockSizes") {
        let bad = |t: &str| entry.error(format!("BlockSizes: {t:?} is no number"));
        let number = |t: &str| t.trim().parse::<u32>().map_err(|_| bad(t));
        all.block_sizes = sizes.split(',').map(number).collect::<Result<_, _>>()?;
        return Ok(());
    }
    let (name, kind) = match (entry.get("SwitchName"), entry.get("BlockName")) {
        (Some(name), None) => (name, SwitchKind::Switch),
        (None, Some(name)) => (name, SwitchKind::Block),
        _ => return Err(entry.error("expected SwitchName=, BlockName= or BlockSizes=")),
    };
    let list = |key: &str| -> Result<Vec<NodeName>, ConfError> {
        let text = entry.get(key).unwrap_or_default();
        let short: String = text.chars().take(60).collect();
        hostlist::expand(text).map_err(|e| entry.error(format!("{key}={short}: {e}")))
    };
    all.switches.push(Switch {
        name: name.to_owned(),
        kind,
        nodes: list("Nodes")?,
        children: list("Switches")?.into_iter().map(|n| n.0).collect(),
        line: entry.line,
    });
    Ok(())
}
