//! Pictures: GPUs by NUMA node with their links; the cluster by its leaf switches.

use super::draw::cell;
use super::sources::Cluster;
use pliant_model::NodeName;
use pliant_model::topology::{LinkKind, NodeTopology};
use std::fmt::Write as _;

const BOX: usize = 84;
const GAP: usize = 24;

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn frame(width: usize, height: usize, title: &str, body: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<title>{0}</title>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"20\" font-size=\"14\">{0}</text>\n{body}</svg>\n",
        escaped(title)
    )
}

/// The inside of a node. The width of a line is the number of links; a bar is a switch that shares them.
pub fn node(name: &NodeName, t: &NodeTopology) -> String {
    let mut order: Vec<usize> = (0..t.gpus.len()).collect();
    order.sort_by_key(|i| (t.gpus.get(*i).and_then(|g| g.numa), *i));
    let mut x = vec![0; t.gpus.len()];
    let (mut at, mut body, mut last, mut begin) = (GAP, String::new(), None, GAP);
    let group = |from: usize, to: usize, numa: Option<u32>, body: &mut String| {
        let label = numa.map_or_else(|| "NUMA unknown".to_owned(), |n| format!("NUMA {n}"));
        let _ = writeln!(
            body,
            "<rect x=\"{}\" y=\"150\" width=\"{}\" height=\"90\" rx=\"6\" fill=\"#eef3fa\"/><text x=\"{}\" y=\"234\" fill=\"#456\">{label}</text>",
            from - 8,
            to - from,
            from
        );
    };
    for (n, i) in order.iter().enumerate() {
        let numa = t.gpus.get(*i).and_then(|g| g.numa);
        if n > 0 && Some(numa) != last {
            group(begin, at, last.flatten(), &mut body);
            at += GAP;
            begin = at;
        }
        last = Some(numa);
        if let Some(x) = x.get_mut(*i) {
            *x = at;
        }
        at += BOX + 12;
    }
    if !order.is_empty() {
        group(begin, at, last.flatten(), &mut body);
    }
    let width = at + GAP;
    links(t, &x, width, &mut body);
    for (i, gpu) in t.gpus.iter().enumerate() {
        let left = x.get(i).copied().unwrap_or(0);
        let fill = if gpu.lost { "#f4c7c3" } else { "#cfe3c8" };
        let _ = writeln!(
            body,
            "<rect x=\"{left}\" y=\"160\" width=\"{BOX}\" height=\"52\" rx=\"4\" fill=\"{fill}\" stroke=\"#678\"/>\
             <text x=\"{0}\" y=\"182\">{1}</text><text x=\"{0}\" y=\"200\" font-size=\"9\">{2}</text>",
            left + 6,
            escaped(&gpu.name),
            escaped(&gpu.model.as_deref().unwrap_or("").chars().take(16).collect::<String>()),
        );
    }
    frame(width, 256, &format!("{name}: {} GPUs", t.gpus.len()), &body)
}

fn links(t: &NodeTopology, x: &[usize], width: usize, body: &mut String) {
    let middle = |i: usize| x.get(i).copied().unwrap_or(0) + BOX / 2;
    for (a, b) in t.linked_pairs() {
        let link = t.link(a, b);
        if link.kind == LinkKind::NvSwitch {
            continue;
        }
        let (from, to) = (middle(a).min(middle(b)), middle(a).max(middle(b)));
        let top = 150usize.saturating_sub(20 + (to - from) / 8).max(36);
        let _ = writeln!(
            body,
            "<path d=\"M{from} 160 Q{} {top} {to} 160\" fill=\"none\" stroke=\"#3a7\" stroke-width=\"{}\"><title>{}</title></path>",
            usize::midpoint(from, to),
            link.count.clamp(1, 8),
            cell(&link)
        );
    }
    let n = t.gpus.len();
    let shared = |a: usize| (0..n).map(|b| t.link(a, b)).find(|l| l.kind == LinkKind::NvSwitch);
    let behind: Vec<(usize, u32)> = (0..n).filter_map(|a| Some((a, shared(a)?.count))).collect();
    if behind.is_empty() {
        return;
    }
    let _ = writeln!(
        body,
        "<rect x=\"{GAP}\" y=\"56\" width=\"{}\" height=\"22\" rx=\"4\" fill=\"#dde\" stroke=\"#779\"/><text x=\"{}\" y=\"71\">NVSwitch</text>",
        width.saturating_sub(2 * GAP),
        GAP + 8
    );
    for (a, count) in behind {
        let x = middle(a);
        let _ = writeln!(body, "<path d=\"M{x} 78 V160\" stroke=\"#3a7\" stroke-width=\"{}\"/>", count.clamp(1, 8));
    }
}

/// The cluster: a box for each leaf switch or block with its nodes.
pub fn cluster(c: &Cluster) -> String {
    let mut boxes: Vec<(String, Vec<String>)> = vec![];
    for leaf in c.switches.leaves() {
        boxes.push((leaf.name.clone(), c.lines(&leaf.nodes)));
    }
    if boxes.is_empty() {
        let all: Vec<NodeName> = c.nodes.keys().map(|n| NodeName(n.clone())).collect();
        boxes.push(("nodes".into(), c.lines(&all)));
    }
    let (mut body, mut y) = (String::new(), 36);
    for (name, lines) in boxes {
        let height = 30 + 16 * lines.len();
        let _ = writeln!(
            body,
            "<rect x=\"12\" y=\"{y}\" width=\"616\" height=\"{height}\" rx=\"6\" fill=\"#eef3fa\" stroke=\"#678\"/>"
        );
        let _ = writeln!(body, "<text x=\"20\" y=\"{}\" font-weight=\"bold\">{}</text>", y + 18, escaped(&name));
        for (i, line) in lines.iter().enumerate() {
            let _ = writeln!(body, "<text x=\"32\" y=\"{}\">{}</text>", y + 36 + 16 * i, escaped(line));
        }
        y += height + 8;
    }
    frame(640, y + 8, "The cluster", &body)
}
