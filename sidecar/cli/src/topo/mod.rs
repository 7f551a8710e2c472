//! `pliant topo`: the topology as measured and as configured.

mod check;
mod draw;
mod export;
mod import;
mod sources;
mod svg;

use crate::args::{Show, Topo, TopoExport};
use anyhow::{Context as _, bail};
use pliant_model::NodeName;
use pliant_model::topology::NodeTopology;
use pliant_protocol::exit;
use sources::Sources;
use std::path::{Path, PathBuf};

/// Runs a command; gives the text to print and the exit code.
pub fn run(command: Topo, config: Option<&Path>) -> anyhow::Result<(String, u8)> {
    match command {
        Topo::Show { node, svg, show } => shown(config, node.map(NodeName), svg, show),
        Topo::Import { files, node, show } => {
            let measured = match node {
                Some(node) => Some(measured(&Sources::read(config, None), &NodeName(node))?),
                None => None,
            };
            Ok((clean(&import::all(&files, measured.as_ref(), show.json)?), exit::OK))
        }
        Topo::Check { conf, show } => {
            let sources = Sources::read(config, conf);
            let findings = check::check(&sources);
            let fails = findings.iter().any(|f| f.level == pliant_protocol::admin::Level::Fail);
            let text = crate::output::choose(show).findings(&findings)?;
            Ok((text, if fails { exit::FAILURE } else { exit::OK }))
        }
        Topo::Export { what } => {
            let sources = Sources::read(config, None);
            let text = match what {
                TopoExport::GresConf => export::gres_conf(&sources)?,
                TopoExport::TopologyConf => export::topology_conf(&sources)?,
                TopoExport::TopologyYaml => export::topology_yaml(&sources)?,
            };
            Ok((text, exit::OK))
        }
    }
}

/// What the agent of a node has measured.
fn measured(sources: &Sources, node: &NodeName) -> anyhow::Result<NodeTopology> {
    let hardware = match &sources.hardware {
        Ok(hardware) => hardware,
        Err(why) => bail!("nothing is measured: {why}"),
    };
    let found = hardware.iter().find(|h| h.node == *node).with_context(|| format!("node {node}: not known"))?;
    let gpus = found.gpus.as_ref().with_context(|| format!("node {node}: no agent is connected"))?;
    Ok(NodeTopology::of_agent(gpus))
}

fn shown(
    config: Option<&Path>,
    node: Option<NodeName>,
    svg: Option<PathBuf>,
    show: Show,
) -> anyhow::Result<(String, u8)> {
    let sources = Sources::read(config, None);
    let (text, picture) = match node {
        Some(node) => {
            let topology = sources.topology_of(&node)?;
            let text = match show.json {
                true => json(&topology)?,
                false => clean(&draw::node(&node, &topology, &sources.differences(&node))),
            };
            (text, svg::node(&node, &topology))
        }
        None => {
            let cluster = sources.cluster();
            (if show.json { json(&cluster)? } else { draw::cluster(&cluster) }, svg::cluster(&cluster))
        }
    };
    if let Some(path) = svg {
        std::fs::write(&path, picture).with_context(|| path.display().to_string())?;
    }
    Ok((text, exit::OK))
}

/// Names in files and of hardware may hold anything: no control character of theirs reaches the terminal.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

fn json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
