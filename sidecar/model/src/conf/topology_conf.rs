//! topology.conf: a tree of switches, or blocks.

use super::{Budget, ConfError, Entry, Read, entries, short};
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
    let (mut nodes, mut children) = (Budget::new(hostlist::MAX_NAMES), Budget::new(hostlist::MAX_NAMES));
    let mut sizes_at = 0;
    for entry in entries(file, text, read, &mut gaps)? {
        if add(&mut all, &entry, &mut nodes, &mut children)? {
            sizes_at = entry.line;
        }
    }
    if let Some(gap) = gaps.first() {
        return Err(ConfError::new(file, 0, format!("not whole: {gap}")));
    }
    checked(file, all, sizes_at)
}

/// Switches that pass [`Switches::check`]; `sizes_at` is the line of the block sizes.
pub(super) fn checked(file: &str, all: Switches, sizes_at: usize) -> Result<Switches, ConfError> {
    match all.check() {
        Ok(()) => Ok(all),
        Err(e) => {
            let line = match &e {
                SwitchError::Duplicate { line, .. }
                | SwitchError::UnknownChild { line, .. }
                | SwitchError::Cycle { line, .. }
                | SwitchError::TwoParents { line, .. }
                | SwitchError::TooDeep { line, .. }
                | SwitchError::Empty { line, .. } => *line,
                SwitchError::Blocks(_) => sizes_at,
            };
            let text = e.to_string();
            let reason = text.strip_prefix(&format!("line {line}: ")).unwrap_or(&text);
            Err(ConfError::new(file, line, reason))
        }
    }
}

/// Adds what a line says; whether it was the sizes of blocks.
fn add(all: &mut Switches, entry: &Entry, nodes: &mut Budget, children: &mut Budget) -> Result<bool, ConfError> {
    const KEYS: [&str; 6] = ["SwitchName", "Switches", "Nodes", "LinkSpeed", "BlockName", "BlockSizes"];
    if let Some(word) = entry.words.iter().find(|w| !KEYS.iter().any(|k| w.key.eq_ignore_ascii_case(k))) {
        let reason = format!("{} is no key of topology.conf ({})", short(&word.key), KEYS.join(", "));
        return Err(entry.error(reason));
    }
    entry.no_cell_shifted(&KEYS)?;
    if let Some(sizes) = entry.get("BlockSizes") {
        let bad = |t: &str| entry.error(format!("BlockSizes: {:?} is no number", short(t)));
        let number = |t: &str| t.trim().parse::<u32>().map_err(|_| bad(t));
        all.block_sizes = sizes.split(',').map(number).collect::<Result<_, _>>()?;
        return Ok(true);
    }
    let (name, kind) = match (entry.get("SwitchName"), entry.get("BlockName")) {
        (Some(name), None) => (name, SwitchKind::Switch),
        (None, Some(name)) => (name, SwitchKind::Block),
        _ => return Err(entry.error("expected SwitchName=, BlockName= or BlockSizes=")),
    };
    let list = |key: &str, budget: &mut Budget| -> Result<Vec<NodeName>, ConfError> {
        let text = entry.get(key).unwrap_or_default();
        let names = hostlist::expand(text).map_err(|e| entry.error(format!("{key}={}: {e}", short(text))))?;
        budget.take(entry, names.len())?;
        Ok(names)
    };
    all.switches.push(Switch {
        name: name.to_owned(),
        kind,
        nodes: list("Nodes", nodes)?,
        children: list("Switches", children)?.into_iter().map(|n| n.0).collect(),
        line: entry.line,
    });
    Ok(false)
}
