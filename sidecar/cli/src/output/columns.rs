//! Columns as squeue has them: a least width each, wider where a value needs it, one space between, the last one open.

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Header.
    pub name: &'static str,
    /// Least width.
    pub width: usize,
    /// Numbers stand to the right.
    pub right: bool,
}

/// A column of text.
pub const fn left(name: &'static str, width: usize) -> Column {
    Column { name, width, right: false }
}

/// A column of numbers.
pub const fn right(name: &'static str, width: usize) -> Column {
    Column { name, width, right: true }
}

/// A value for one line of a terminal: text of users and of Slurm must not move the cursor or begin a line.
pub fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

/// The table, each line with its newline. An empty value is shown as `-`.
pub fn render<const N: usize>(columns: &[Column; N], rows: &[[String; N]], header: bool) -> String {
    let rows = rows.iter().map(|row| {
        row.each_ref().map(|cell| Some(clean(cell)).filter(|c| !c.is_empty()).unwrap_or_else(|| "-".to_owned()))
    });
    let head = header.then(|| columns.map(|c| c.name.to_owned()));
    let lines: Vec<[String; N]> = head.into_iter().chain(rows).collect();
    let mut widths = columns.map(|c| c.width);
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut out = String::new();
    for line in &lines {
        let mut text = String::new();
        for (i, (column, cell)) in columns.iter().zip(line).enumerate() {
            let width = widths.get(i).copied().unwrap_or(column.width);
            let padding = " ".repeat(width - cell.chars().count().min(width));
            if i > 0 {
                text.push(' ');
            }
            let (before, after) = if column.right { (padding.as_str(), "") } else { ("", padding.as_str()) };
            text.extend([before, cell, after]);
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}
