//! The timeline as SVG: one row per GPU, coloured by job, over time. Rectangles and text, no fonts, nothing to load.

use crate::play::Outcome;
use crate::record::{History, Mark, Role, Span};
use std::fmt::Write as _;

const NODES: u32 = 4;
const GPUS: u32 = 8;
const WIDTH: f64 = 900.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 14.0;
const ROW: f64 = 11.0;
const BAR: f64 = 9.5;
const NODE_GAP: f64 = 8.0;
/// Title, legend.
const HEAD: f64 = 62.0;
/// Height of one row of numbered marks.
const TIER: f64 = 18.0;
const LINE: f64 = 18.0;

const INK: &str = "#1f2933";
const FAINT: &str = "#7b8794";

/// What a colour stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    Own,
    Lent,
    Loading,
    Fixed,
    Rigid,
    Idle,
}

impl Look {
    const ALL: [Look; 6] = [Look::Own, Look::Lent, Look::Loading, Look::Fixed, Look::Rigid, Look::Idle];

    fn colour(self) -> &'static str {
        match self {
            Look::Own => "#0b4f8a",
            Look::Lent => "#3f97d9",
            Look::Loading => "#a9d3f3",
            Look::Fixed => "#7a8b99",
            Look::Rigid => "#e08a1e",
            Look::Idle => "#eef1f4",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Look::Own => "elastic job, its own GPUs",
            Look::Lent => "lent to it",
            Look::Loading => "lent, new ranks load",
            Look::Fixed => "fixed-size job",
            Look::Rigid => "rigid job",
            Look::Idle => "idle",
        }
    }
}

/// Seconds to pixels, and what lies where.
#[derive(Debug)]
struct Frame {
    seconds: f64,
    /// Upper edge of the first row.
    top: f64,
}

impl Frame {
    fn x(&self, at: f64) -> f64 {
        LEFT + (at / self.seconds).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, node: u32, gpu: u32) -> f64 {
        let node_height = f64::from(GPUS) * ROW + NODE_GAP;
        self.top + f64::from(node) * node_height + f64::from(gpu) * ROW
    }

    fn bottom(&self) -> f64 {
        self.y(NODES - 1, GPUS)
    }
}

/// Draws it.
pub fn draw(history: &History, outcome: Option<&Outcome>) -> String {
    let ends = history.spans.iter().map(|s| s.end);
    let seconds = ends.chain(history.marks.iter().map(|m| m.at)).fold(1.0, f64::max);
    let mut frame = Frame { seconds, top: 0.0 };
    let (tiers, count) = tiers(&frame, &history.marks);
    frame.top = HEAD + f64::from(count) * TIER + 4.0;
    let list = f64::from(u32::try_from(history.marks.len()).unwrap_or(0)) * LINE;
    let height = frame.bottom() + 44.0 + list + if outcome.is_some() { 30.0 } else { 4.0 };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {WIDTH} {height:.0}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"{INK}\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    head(&mut svg);
    grid(&mut svg, &frame);
    for span in &history.spans {
        bars(&mut svg, &frame, history, span);
    }
    marks(&mut svg, &frame, &history.marks, &tiers);
    footer(&mut svg, &frame, history, outcome);
    svg.push_str("</svg>\n");
    svg
}

fn head(svg: &mut String) {
    text(
        svg,
        LEFT,
        20.0,
        "font-size=\"15\" font-weight=\"bold\"",
        "An elastic training on 4 nodes with 8 simulated GPUs each",
    );
    let mut x = LEFT;
    for look in Look::ALL {
        rect(svg, (x, 34.0), (12.0, 12.0), look.colour());
        text(svg, x + 17.0, 44.5, "", look.name());
        // About the width of a sans-serif of 12 px.
        x += 34.0 + 6.3 * f64::from(u32::try_from(look.name().len()).unwrap_or(0));
    }
}

/// Rows, their names, the axis.
fn grid(svg: &mut String, frame: &Frame) {
    let width = WIDTH - LEFT - RIGHT;
    for node in 0..NODES {
        let middle = frame.y(node, GPUS / 2) + 4.0;
        text(svg, 12.0, middle, "font-weight=\"bold\"", &format!("n{node}"));
        for gpu in 0..GPUS {
            let y = frame.y(node, gpu);
            rect(svg, (LEFT, y), (width, BAR), Look::Idle.colour());
            let style = format!("font-size=\"9\" text-anchor=\"end\" fill=\"{FAINT}\"");
            text(svg, LEFT - 6.0, y + 8.0, &style, &format!("gpu {gpu}"));
        }
    }
    let step = [5.0, 10.0, 20.0, 30.0, 60.0, 120.0].into_iter().find(|s| frame.seconds / s <= 16.0).unwrap_or(300.0);
    let y = frame.bottom();
    let mut at = 0.0;
    while at <= frame.seconds {
        let x = frame.x(at);
        line(svg, (x, y), (x, y + 5.0), FAINT, "");
        let style = format!("font-size=\"11\" text-anchor=\"middle\" fill=\"{FAINT}\"");
        text(svg, x, y + 18.0, &style, &format!("{at:.0} s"));
        at += step;
    }
    line(svg, (LEFT, y), (WIDTH - RIGHT, y), FAINT, "");
}

/// A span's rectangle; of a slice the time before its first step is lighter.
fn bars(svg: &mut String, frame: &Frame, history: &History, span: &Span) {
    let Some(node) = span.gpu.node.strip_prefix('n').and_then(|n| n.parse().ok()) else {
        return;
    };
    let y = frame.y(node, span.gpu.index);
    let mut bar = |from: f64, to: f64, look: Look| {
        let (x, end) = (frame.x(from), frame.x(to));
        rect(svg, (x, y), ((end - x).max(0.5), BAR), look.colour());
    };
    let look = match span.role {
        Role::Base => Look::Own,
        Role::Fixed => Look::Fixed,
        Role::Rigid => Look::Rigid,
        Role::Slice => Look::Lent,
    };
    if look != Look::Lent {
        return bar(span.start, span.end, look);
    }
    let trained = |(at, ranks): &&(f64, u64)| *at >= span.start && *ranks > 2;
    let joined = history.worlds.iter().find(trained);
    let joined = joined.map_or(span.end, |(at, _)| at.min(span.end));
    bar(span.start, joined, Look::Loading);
    if joined < span.end {
        bar(joined, span.end, Look::Lent);
    }
}

/// For each mark the row of its number, so that no two numbers overlap; and how many rows there are.
fn tiers(frame: &Frame, marks: &[Mark]) -> (Vec<u32>, u32) {
    let mut last: Vec<f64> = vec![];
    let mut rows = vec![];
    for mark in marks {
        let x = frame.x(mark.at);
        let row = last.iter().position(|end| end + TIER <= x).unwrap_or(last.len());
        match last.get_mut(row) {
            Some(end) => *end = x,
            None => last.push(x),
        }
        rows.push(u32::try_from(row).unwrap_or(0));
    }
    let count = u32::try_from(last.len()).unwrap_or(0);
    (rows, count)
}

fn marks(svg: &mut String, frame: &Frame, marks: &[Mark], tiers: &[u32]) {
    for (n, (mark, tier)) in (1..).zip(marks.iter().zip(tiers)) {
        let (x, y) = (frame.x(mark.at), HEAD + f64::from(*tier) * TIER + 6.0);
        let dashes = "stroke-dasharray=\"3 2\"";
        line(svg, (x, y), (x, frame.bottom()), INK, dashes);
        number(svg, x, y, n);
        let below = frame.bottom() + 44.0 + f64::from(n - 1) * LINE;
        number(svg, LEFT + 8.0, below - 4.0, n);
        let style = format!("text-anchor=\"end\" fill=\"{FAINT}\"");
        text(svg, LEFT + 66.0, below, &style, &format!("{:.1} s", mark.at));
        text(svg, LEFT + 76.0, below, "", &mark.text);
    }
}

fn number(svg: &mut String, x: f64, y: f64, n: u32) {
    let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"8\" fill=\"{INK}\"/>");
    let style = "font-size=\"10\" text-anchor=\"middle\" fill=\"#ffffff\"";
    text(svg, x, y + 3.5, style, &n.to_string());
}

fn footer(svg: &mut String, frame: &Frame, history: &History, outcome: Option<&Outcome>) {
    let Some(outcome) = outcome else { return };
    let list = f64::from(u32::try_from(history.marks.len()).unwrap_or(0)) * LINE;
    let result = format!(
        "Test accuracy at the end: {:.3} elastic, {:.3} at the fixed size of 2. {} steps each, {} repeated.",
        outcome.elastic.accuracy, outcome.fixed.accuracy, outcome.elastic.log.steps, outcome.elastic.log.repeated,
    );
    let y = frame.bottom() + 44.0 + list + 8.0;
    text(svg, LEFT, y, "font-weight=\"bold\"", &result);
}

fn rect(svg: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
    );
}

fn line(svg: &mut String, from: (f64, f64), to: (f64, f64), colour: &str, style: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\" {style}/>"
    );
}

fn text(svg: &mut String, x: f64, y: f64, style: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{words}</text>");
}
