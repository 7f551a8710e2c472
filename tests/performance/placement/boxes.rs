//! Boxes with what is right about them.

use anyhow::{Context, Result, bail};
use pliant_model::capture::{self, Capture};
use pliant_model::topology::{LinkKind, NodeTopology};
use pliant_policy::placement::{GpuSet, Tables, Want};
use std::fmt::Write as _;
use std::path::PathBuf;

/// Per capture: its id, pairs with their link counts, and for sizes of jobs the sets that are right on an empty box
/// (GPUs as hexadecimal digits). From the table of cases.
const RIGHT: &[(&str, &str, &str)] = &[
    (
        "topo/01",
        "011 021 032 042 122 131 152 232 261 371 451 461 472 562 571 672",
        "2:03,12,23,47,56,67 3:023,123,467,567 4:0123,4567",
    ),
    ("topo/02", "", "2:01,23"),
    ("topo/03", "*c", "2:01,23,45,67"),
    ("topo/05", "01c 23c", "2:01,23 4:0123"),
    ("topo/06", "", "2:01"),
    ("topo/07", "01c 23c", "2:01,23"),
    ("topo/09", "014", "1:2 2:01"),
    ("topo/10", "", "2:01,02,03,12,13,23,45,46,47,56,57,67 4:0123,4567"),
    ("topo/11", "", "2:01,02,03,12,13,23,45,46,47,56,57,67 4:0123,4567"),
    ("topo/12", "", "1:0 2:12,34"),
    ("topo/14", "", "2:01"),
    ("topo/15", "*i", "4:0123,4567"),
    ("topo/17", "01i 02i 03i 12i 13i 23i 45i 46i 47i 56i 57i 67i", "2:01,02,03,12,13,23,45,46,47,56,57,67 4:0123,4567"),
    ("topo/19", "*4", "4:0123"),
    ("topo/21", "012 022 131 232", "2:01,23 3:012,023"),
    (
        "topo/23",
        "011 021 032 042 122 131 152 232 261 371 451 461 472 562 571 672",
        "2:03,12,23,47,56,67 3:023,123,467,567 4:0123,4567",
    ),
    ("topo/24", "*c", "4:0123"),
    ("topo/25", "012", "2:01"),
    ("topo/26", "", "2:01"),
    ("topo/28", "", "2:01,23"),
    ("topo/29", "*6", ""),
    ("topo/31", "012 022 031 041 121 131 152 232 261 372 452 462 471 561 571", "2:01,02,15,23,37,45,46"),
    ("topo/34", "01c", "2:01"),
    ("topo-amd/01", "*1", "4:0123"),
    ("topo-amd/03", "", "4:0123"),
];

/// Our own, for a checkout without the collection: text, pairs, sets.
const OWN: &[(&str, &str, &str, &str)] = &[
    ("bridged", include_str!("bridged.txt"), "02b 13b", "2:02,13 1:4"),
    ("switched", include_str!("switched.txt"), "*c", "2:03,12,46,57"),
];

/// A box and what is right about it.
#[derive(Debug)]
pub struct Known {
    /// For people.
    pub name: String,
    /// As read.
    pub topology: NodeTopology,
    links: Vec<(usize, usize, u32)>,
    choices: Vec<(u32, Vec<Vec<usize>>)>,
}

/// A digit; beyond hexadecimal, so that NV18 is `i`.
fn digit(c: char) -> Result<u32> {
    c.to_digit(36).with_context(|| format!("{c:?} is no digit"))
}

/// All boxes: those of the collection where it is there, and our own.
pub fn all() -> Result<Vec<Known>> {
    let root = pliant_tests::root().join("../shared/cases/files");
    let mut all = vec![];
    if root.is_dir() {
        for (id, links, choices) in RIGHT {
            let text = std::fs::read_to_string(file(&root, id)?)?;
            all.push(known(id, &text, links, choices)?);
        }
    } else {
        eprintln!("bench placement: skipped the captures of ../shared/cases, which is not there");
    }
    for (name, text, links, choices) in OWN {
        all.push(known(name, text, links, choices)?);
    }
    Ok(all)
}

/// The topology of a capture of the collection; `None`: the collection is not there.
pub fn topology(id: &str) -> Result<Option<NodeTopology>> {
    let root = pliant_tests::root().join("../shared/cases/files");
    if !root.is_dir() {
        return Ok(None);
    }
    match capture::read(&std::fs::read_to_string(file(&root, id)?)?).with_context(|| id.to_owned())? {
        Capture::Topology(topology) => Ok(Some(topology)),
        Capture::List(_) => bail!("{id}: a list"),
    }
}

fn file(root: &std::path::Path, id: &str) -> Result<PathBuf> {
    let (folder, number) = id.split_once('/').context("folder/number")?;
    for entry in std::fs::read_dir(root.join(folder))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&format!("{number}-"))) {
            return Ok(path);
        }
    }
    bail!("no capture {id}")
}

fn known(name: &str, text: &str, links: &str, choices: &str) -> Result<Known> {
    let Capture::Topology(topology) = capture::read(text).with_context(|| name.to_owned())? else {
        bail!("{name}: a list");
    };
    let n = topology.gpus.len();
    let mut expected = vec![];
    for word in links.split_whitespace() {
        let digits: Vec<char> = word.chars().collect();
        match digits.as_slice() {
            ['*', count] => {
                let count = digit(*count)?;
                expected.extend((0..n).flat_map(|a| (a + 1..n).map(move |b| (a, b, count))));
            }
            [a, b, count] => expected.push((digit(*a)? as usize, digit(*b)? as usize, digit(*count)?)),
            _ => bail!("{name}: {word}"),
        }
    }
    let mut right = vec![];
    for word in choices.split_whitespace() {
        let (size, sets) = word.split_once(':').context("size:sets")?;
        let set = |s: &str| s.chars().map(|c| Ok(digit(c)? as usize)).collect::<Result<Vec<usize>>>();
        right.push((size.parse()?, sets.split(',').map(set).collect::<Result<Vec<_>>>()?));
    }
    Ok(Known { name: name.to_owned(), topology, links: expected, choices: right })
}

impl Known {
    /// The same box with GPU i called `order[i]`, written as a capture and read again.
    pub fn relabelled(&self, order: &[usize]) -> Result<NodeTopology> {
        let t = &self.topology;
        let n = t.gpus.len();
        let mut old = vec![0; n];
        order.iter().enumerate().for_each(|(i, to)| old[*to] = i);
        if t.linked_pairs().iter().any(|(a, b)| t.link(*a, *b).kind == LinkKind::Xgmi) {
            let mut renamed = NodeTopology::unlinked(t.source, old.iter().map(|o| t.gpus[*o].clone()).collect());
            (0..n).for_each(|a| (a + 1..n).for_each(|b| renamed.set_link(a, b, t.link(old[a], old[b]))));
            return Ok(renamed);
        }
        let names: Vec<String> = (0..n).map(|i| format!("GPU{i}")).collect();
        let mut text = format!("\t{}\tCPU Affinity\tNUMA Affinity\n", names.join("\t"));
        for a in 0..n {
            write!(text, "GPU{a}")?;
            for b in 0..n {
                let link = t.link(old[a], old[b]);
                let cell = match (a == b, link.is_linked(), link.path) {
                    (true, ..) => " X ".to_owned(),
                    (_, true, _) => format!("NV{}", link.count),
                    (_, _, path) => path.map_or_else(|| "SYS".to_owned(), |p| p.to_string()),
                };
                write!(text, "\t{cell}")?;
            }
            let gpu = &t.gpus[old[a]];
            let cpus =
                if gpu.cpus.is_empty() { "N/A".into() } else { pliant_model::conf::index_list::format(&gpu.cpus) };
            writeln!(text, "\t{cpus}\t{}", gpu.numa.map_or_else(|| "N/A".to_owned(), |n| n.to_string()))?;
        }
        match capture::read(&text)? {
            Capture::Topology(t) => Ok(t),
            Capture::List(_) => bail!("a list"),
        }
    }

    /// Looks at a reading of this box, in which GPU i is called `order[i]`: how many values are right, of how many.
    pub fn check(&self, seen: &NodeTopology, order: &[usize]) -> Result<(u32, u32)> {
        let n = order.len();
        let (mut right, mut all) = (0, 0);
        let mut look = |what: &str, good: bool| {
            all += 1;
            right += u32::from(good);
            if !good {
                eprintln!("bench placement: {} {order:?}: {what}", self.name);
            }
        };
        look("number of GPUs", seen.gpus.len() == n);
        for a in 0..n {
            for b in a + 1..n {
                let expected = self.links.iter().find(|l| (l.0, l.1) == (a, b)).map_or(0, |l| l.2);
                let link = seen.link(order[a], order[b]);
                look(&format!("link {a}-{b}"), link.count == expected && link.is_linked() == (expected > 0));
            }
            let (was, is) = (&self.topology.gpus[a], &seen.gpus[order[a]]);
            look(&format!("place of {a}"), was.numa == is.numa && was.cpus == is.cpus);
        }
        let tables = Tables::new(seen)?;
        for (gpus, sets) in &self.choices {
            let choice = tables.choose(GpuSet::first(n), &Want::gpus(*gpus))?.set;
            let good = sets.iter().any(|s| GpuSet::of(s.iter().map(|g| order[*g])) == choice);
            look(&format!("choice of {gpus}: {:?}", choice.iter().collect::<Vec<_>>()), good);
        }
        Ok((right, all))
    }
}
