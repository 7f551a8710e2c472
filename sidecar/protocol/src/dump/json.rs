//! JSON of `--json` in any data_parser version, and one object a line.

use super::{Dump, DumpError, DumpJob, DumpNode, Held, kinds};
use pliant_model::{GpuCount, NodeName, gres, hostlist};
use serde_json::Value;

/// Reads a whole document, or else line by line; bad lines are counted.
pub fn read(text: &str) -> Result<Dump, DumpError> {
    match serde_json::from_str::<Value>(text) {
        Ok(value) if value.get("jobs").is_some() || value.get("nodes").is_some() => Ok(document(&value)),
        Ok(value) if value.is_object() && text.trim().lines().count() == 1 => Ok(lines(text)),
        Ok(_) => Err(DumpError::new(
            0,
            "JSON without \"jobs\" and \"nodes\": this is no output of scontrol, squeue or sacct",
        )),
        Err(e) => {
            let first = text.lines().next().unwrap_or_default();
            match serde_json::from_str::<Value>(first) {
                Ok(_) => Ok(lines(text)),
                Err(_) => Err(DumpError::new(e.line(), format!("no JSON: {e}"))),
            }
        }
    }
}

fn document(value: &Value) -> Dump {
    let list = |key: &str| value.get(key).and_then(Value::as_array).into_iter().flatten();
    let error = |e: &Value| {
        let text = ["description", "error"].iter().filter_map(|k| e.get(*k)?.as_str()).collect::<Vec<_>>();
        if text.is_empty() { e.to_string() } else { text.join(": ") }
    };
    let (jobs, unread): (Vec<_>, Vec<_>) = list("jobs").map(job).partition(Result::is_ok);
    Dump {
        unread: unread.into_iter().filter_map(Result::err).collect(),
        jobs: jobs.into_iter().flatten().collect(),
        nodes: list("nodes").map(node).collect(),
        errors: list("errors").map(error).collect(),
        skipped: 0,
    }
}

/// A number in any of its forms: plain, `{set, infinite, number}`, text. Unset, infinite and null are `None`.
fn number(value: Option<&Value>) -> Option<u64> {
    match value? {
        Value::Object(o) => {
            let is = |key: &str| o.get(key).and_then(Value::as_bool);
            if is("set") == Some(false) || is("infinite") == Some(true) { None } else { number(o.get("number")) }
        }
        Value::String(text) => text.parse().ok(),
        other => other.as_u64(),
    }
}

/// Words in any of their forms: a list, a text with `+` or commas, `{current: […]}`.
fn words(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::Array(all)) => all.iter().filter_map(Value::as_str).map(|s| s.trim().to_owned()).collect(),
        Some(Value::String(text)) => {
            text.split(['+', ',']).map(|s| s.trim().to_owned()).filter(|s| !s.is_empty()).collect()
        }
        Some(Value::Object(o)) => words(o.get("current")),
        _ => vec![],
    }
}

fn text<'a>(value: &'a Value, key: &str) -> Option<&'a str> {
    value.get(key).and_then(Value::as_str).map(str::trim).filter(|t| !t.is_empty() && *t != "None")
}

fn count(n: Option<u64>) -> GpuCount {
    n.and_then(|n| GpuCount::try_from(n).ok()).unwrap_or(1).max(1)
}

/// A job; `Err` says what of it cannot be read: it must not look as if it held nothing.
fn job(j: &Value) -> Result<DumpJob, String> {
    let id = number(j.get("job_id")).and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
    let nodes = text(j, "nodes").unwrap_or_default();
    let names = hostlist::expand(nodes).map_err(|e| format!("job {id}: nodes {nodes:?}: {e}"))?;
    let details: Vec<&str> =
        j.get("gres_detail").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    if !details.is_empty() && details.len() != names.len() {
        return Err(format!("job {id}: {} nodes, and gres_detail of {}", names.len(), details.len()));
    }
    let held = names.iter().zip(details).map(|(node, detail)| Held {
        node: node.clone(),
        gpus: gres::gpu_total(detail),
        kinds: kinds(detail),
        indexes: gres::gpu_indexes(detail),
        ..Held::default()
    });
    let held: Vec<Held> = held.filter(|h| h.gpus > 0).collect();
    Ok(DumpJob {
        id,
        state: words(j.get("job_state").or_else(|| j.get("state"))),
        held: if held.is_empty() { accounted(j, &names) } else { held },
        wants: wants(j),
        time_limit_min: number(j.get("time_limit")).or_else(|| number(j.get("time")?.get("limit"))),
        reason: text(j, "state_reason").map(str::to_owned),
    })
}

/// sacct's lists of TRES: `tres.allocated` with type gres, name gpu. They name no indexes.
fn accounted(j: &Value, names: &[NodeName]) -> Vec<Held> {
    let allocated = j.get("tres").and_then(|t| t.get("allocated")).and_then(Value::as_array);
    let is_gpu = |t: &&Value| text(t, "type") == Some("gres") && text(t, "name").is_some_and(|n| n == "gpu");
    let gpus = allocated.into_iter().flatten().find(is_gpu).and_then(|t| number(t.get("count")));
    let gpus = gpus.and_then(|n| GpuCount::try_from(n).ok()).unwrap_or(0);
    match (names, gpus) {
        (_, 0) => vec![],
        // Over several nodes it is not said how they are spread.
        ([node], _) => vec![Held { node: node.clone(), gpus, ..Held::default() }],
        (many, _) => vec![Held { node: NodeName(hostlist::compress(many)), gpus, ..Held::default() }],
    }
}

/// What it asks for, by whichever field says so.
fn wants(j: &Value) -> Option<GpuCount> {
    let of = |key: &str| text(j, key).and_then(gres::tres_gpus);
    let nodes = || count(number(j.get("node_count")));
    let per_task = || Some(of("tres_per_task")?.saturating_mul(count(number(j.get("tasks")))));
    let sockets = || count(number(j.get("sockets_per_node")));
    let per_socket = || Some(of("tres_per_socket")?.saturating_mul(sockets()).saturating_mul(nodes()));
    let per_node = || Some(of("tres_per_node")?.saturating_mul(nodes()));
    of("tres_per_job").or_else(per_node).or_else(per_task).or_else(per_socket).or_else(|| of("tres_req_str"))
}

fn node(n: &Value) -> DumpNode {
    let gres = |key: &str| text(n, key).unwrap_or_default();
    let memory =
        text(n, "tres_used").and_then(|t| t.split(',').find_map(|w| w.strip_prefix("mem="))).and_then(gres::size_mib);
    DumpNode {
        name: NodeName(text(n, "name").unwrap_or_default().to_owned()),
        state: words(n.get("state")),
        gpus: gres::gpu_total(gres("gres")),
        used: gres::gpu_total(gres("gres_used")),
        used_indexes: gres::gpu_indexes(gres("gres_used")),
        memory_used_mib: memory.or_else(|| number(n.get("alloc_memory"))),
        reason: text(n, "reason").map(str::to_owned),
    }
}

/// One object a line, with the short keys of a format string: `id`, `state`, `r` (nodes or reason), or `n` and `s` of a
/// node.
fn lines(text_of: &str) -> Dump {
    let mut dump = Dump::default();
    for line in text_of.lines().filter(|l| !l.trim().is_empty() && !l.trim_start().starts_with('#')) {
        let Ok(value) = serde_json::from_str::<Value>(line) else {
            dump.skipped += 1;
            continue;
        };
        if let Some(id) = number(value.get("id")).and_then(|n| u32::try_from(n).ok()) {
            let place = text(&value, "r").unwrap_or_default();
            // A reason stands in parentheses, and may hold more of them.
            let reason = place.strip_prefix('(').and_then(|r| r.strip_suffix(')')).map(str::to_owned);
            let nodes = if reason.is_none() { hostlist::expand(place).unwrap_or_default() } else { vec![] };
            let held = nodes.into_iter().map(|node| Held { node, ..Held::default() }).collect();
            dump.jobs.push(DumpJob { id, state: words(value.get("state")), held, reason, ..DumpJob::default() });
        } else if let Some(name) = text(&value, "n") {
            let state = words(value.get("s"));
            dump.nodes.push(DumpNode { name: NodeName(name.to_owned()), state, ..DumpNode::default() });
        } else {
            dump.skipped += 1;
        }
    }
    dump
}
