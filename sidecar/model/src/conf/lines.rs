//! The form that slurm.conf, gres.conf and topology.conf share: lines of KEY=VALUE words, `#` comments, `\` at the end
//! of a line to go on, quotes, blanks around `=`, and `Include`.

use super::{ConfError, MAX_DEPTH, MAX_LINE, Read};

/// One KEY=VALUE.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Word {
    /// As typed; case has no meaning.
    pub key: String,
    /// Without quotes.
    pub value: String,
}

/// A line that is neither empty nor comment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its file.
    pub file: String,
    /// Its first line, from 1.
    pub line: usize,
    /// In the order written.
    pub words: Vec<Word>,
}

impl Entry {
    /// The last value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.words.iter().rev().find(|w| w.key.eq_ignore_ascii_case(key)).map(|w| w.value.as_str())
    }

    /// The key of the first word, which says what the line is about.
    pub fn is(&self, key: &str) -> bool {
        self.words.first().is_some_and(|w| w.key.eq_ignore_ascii_case(key))
    }

    /// An error at this line.
    pub fn error(&self, reason: impl Into<String>) -> ConfError {
        ConfError::new(&self.file, self.line, reason)
    }
}

/// Reads a file and what it includes. `gaps` gets each include that cannot be read, with the reason: what is in it is
/// then not known.
///
/// # Errors
/// A line that is no list of KEY=VALUE words, an unrendered template, too long a line, includes too deep or in a circle.
pub fn entries(file: &str, text: &str, read: Read<'_>, gaps: &mut Vec<String>) -> Result<Vec<Entry>, ConfError> {
    let mut all = vec![];
    let mut stack = vec![file.to_owned()];
    file_entries(text, &mut stack, read, gaps, &mut all)?;
    Ok(all)
}

fn file_entries(
    text: &str,
    stack: &mut Vec<String>,
    read: Read<'_>,
    gaps: &mut Vec<String>,
    all: &mut Vec<Entry>,
) -> Result<(), ConfError> {
    let file = stack.last().cloned().unwrap_or_default();
    for (line, content) in logical_lines(&file, text)? {
        if let Some(mark) = template(&content) {
            let reason = format!("{mark} is an unrendered template: give the file that Slurm reads");
            return Err(ConfError::new(&file, line, reason));
        }
        if let Some(path) = include(&content) {
            let at = |reason: String| ConfError::new(&file, line, reason);
            if stack.iter().any(|f| f == path) {
                return Err(at(format!("Include {path}: it includes itself")));
            }
            if stack.len() > MAX_DEPTH {
                return Err(at(format!("Include {path}: more than {MAX_DEPTH} files deep")));
            }
            match read(path) {
                Ok(text) => {
                    stack.push(path.to_owned());
                    file_entries(&text, stack, read, gaps, all)?;
                    stack.pop();
                }
                Err(why) => gaps.push(format!("{file}:{line}: Include {path}: {why}")),
            }
            continue;
        }
        let words = words(&content).map_err(|reason| ConfError::new(&file, line, reason))?;
        all.push(Entry { file: file.clone(), line, words });
    }
    Ok(())
}

/// Lines with their continuations, without comments and without what is empty; the number is that of the first.
fn logical_lines(file: &str, text: &str) -> Result<Vec<(usize, String)>, ConfError> {
    let mut all = vec![];
    let mut open: Option<(usize, String)> = None;
    for (number, raw) in text.lines().enumerate().map(|(i, l)| (i + 1, l)) {
        let (first, mut content) = open.take().unwrap_or((number, String::new()));
        if content.len() + raw.len() > MAX_LINE {
            return Err(ConfError::new(file, number, format!("longer than {MAX_LINE} bytes")));
        }
        if raw.contains('\0') {
            return Err(ConfError::new(file, number, "holds a NUL byte: this is no text file"));
        }
        let bare = uncomment(raw);
        match bare.strip_suffix('\\').filter(|_| bare.len() == raw.trim_end().len()) {
            Some(more) => {
                content.push_str(more);
                open = Some((first, content));
            }
            None => {
                content.push_str(&bare);
                if !content.trim().is_empty() {
                    all.push((first, content.trim().to_owned()));
                }
            }
        }
    }
    all.extend(open.filter(|(_, c)| !c.trim().is_empty()).map(|(n, c)| (n, c.trim().to_owned())));
    Ok(all)
}

/// A line up to its `#`, unless that is written `\#`.
fn uncomment(raw: &str) -> String {
    let mut out = String::with_capacity(raw.len());
    let mut chars = raw.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if chars.peek() == Some(&'#') => {
                out.push('#');
                chars.next();
            }
            '#' => break,
            _ => out.push(c),
        }
    }
    out.trim_end().to_owned()
}

/// The mark of a template language that nobody has rendered.
fn template(content: &str) -> Option<&str> {
    for mark in ["{{", "{%", "<%", "${"] {
        if let Some(at) = content.find(mark) {
            let end = content.get(at..).unwrap_or_default().char_indices().nth(24).map_or(content.len(), |(i, _)| at + i);
            return content.get(at..end);
        }
    }
    // `{name}` where a value, or a whole line, should be.
    let values = content.split(['=', ' ', '\t', '/', ',']);
    values.into_iter().find(|v| {
        let name = v.strip_prefix('{').and_then(|v| v.strip_suffix('}'));
        name.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'))
    })
}

fn include(content: &str) -> Option<&str> {
    let (word, path) = content.split_once([' ', '\t'])?;
    let path = path.trim();
    (word.eq_ignore_ascii_case("include") && !path.is_empty() && !path.starts_with('=')).then_some(path)
}

/// KEY=VALUE words of a line. As in Slurm, blanks around `=` have no meaning, so a key without value takes the next
/// word, and only the last of a line may be empty.
fn words(content: &str) -> Result<Vec<Word>, String> {
    let mut all = vec![];
    let mut rest = content.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c.is_whitespace()).unwrap_or(rest.len());
        let (key, after) = rest.split_at(end);
        let short: String = key.chars().take(40).collect();
        let Some(after) = after.trim_start().strip_prefix('=') else {
            return Err(format!("expected KEY=VALUE, found {short:?}"));
        };
        let key = key.strip_suffix(['+', '-']).unwrap_or(key);
        if key.is_empty() || !key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')) {
            return Err(format!("{short:?} is no key"));
        }
        let after = after.trim_start();
        let (value, next) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').ok_or_else(|| format!("{key}: the quote is not closed"))?,
            None => after.split_at(after.find(char::is_whitespace).unwrap_or(after.len())),
        };
        all.push(Word { key: key.to_owned(), value: value.to_owned() });
        rest = next.trim_start();
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Entry>, ConfError> {
        entries("f", text, &mut |_| Err("not there".into()), &mut vec![])
    }

    fn flat(text: &str) -> Vec<(usize, String)> {
        let show = |e: &Entry| e.words.iter().map(|w| format!("{}={}", w.key, w.value)).collect::<Vec<_>>().join(" ");
        read(text).unwrap().iter().map(|e| (e.line, show(e))).collect()
    }

    #[test]
    fn the_form() {
        let text = "# c\n A = b C=\"d e\"\t# more\n\nX=1 \\\n  Y=2\nK=a\\#b\nLast=\n";
        let want = [(2, "A=b C=d e"), (4, "X=1 Y=2"), (6, "K=a#b"), (7, "Last=")];
        assert_eq!(flat(text), want.map(|(n, t)| (n, t.to_owned())));
    }

    #[test]
    fn damage_is_named_with_its_line() {
        for (text, line, word) in [
            ("A=1\nfoo\n", 2, "expected KEY=VALUE, found \"foo\""),
            ("A=\"b\n", 1, "quote"),
            ("=3\n", 1, "is no key"),
            ("A=1\nB={{ x }}\n", 2, "template"),
            ("A={name}\n", 1, "template"),
            ("{% for x in y %}\n", 1, "template"),
            ("{auth}\n", 1, "template"),
            ("A=\0\n", 1, "NUL"),
        ] {
            let e = read(text).unwrap_err();
            assert!(e.line == line && e.reason.contains(word), "{text:?}: {e}");
        }
        let long = format!("A={}\n", "x".repeat(MAX_LINE));
        assert!(read(&long).unwrap_err().reason.contains("longer"));
    }

    #[test]
    fn includes_are_followed_or_named() {
        let mut files = |path: &str| match path {
            "a" => Ok("X=1\ninclude b\n".to_owned()),
            "loop" => Ok("Include loop\n".to_owned()),
            _ => Err("not there".to_owned()),
        };
        let mut gaps = vec![];
        let all = entries("f", "Include a\nY=2\n", &mut files, &mut gaps).unwrap();
        assert_eq!(all.iter().map(|e| (e.file.as_str(), e.line)).collect::<Vec<_>>(), [("a", 1), ("f", 2)]);
        assert_eq!(gaps, ["a:2: Include b: not there"]);
        let e = entries("f", "Include loop\n", &mut files, &mut gaps).unwrap_err();
        assert_eq!(e.to_string(), "loop:1: Include loop: it includes itself");
        let mut deeper = |path: &str| Ok(format!("Include {path}x\n"));
        assert!(entries("f", "Include x\n", &mut deeper, &mut gaps).unwrap_err().reason.contains("deep"));
    }
}
