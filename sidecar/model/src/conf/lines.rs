//! The form that slurm.conf, gres.conf and topology.conf share: lines of KEY=VALUE words, `#` comments, `\` at the end
//! of a line to go on, quotes, blanks around `=`, and `Include`.

use super::{ConfError, MAX_DEPTH, MAX_INCLUDES, MAX_LINE, MAX_TEXT, Read};

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

    /// Refuses a key whose value is missing, so that the next word has become it (`Type= File=…`).
    ///
    /// # Errors
    /// With the key that has no value.
    pub fn no_cell_shifted(&self, keys: &[&str]) -> Result<(), ConfError> {
        let next = |w: &Word| {
            let name = w.value.split_once('=').map_or("", |(name, _)| name);
            keys.iter().any(|k| k.eq_ignore_ascii_case(name))
        };
        match self.words.iter().find(|w| w.value.is_empty() || next(w)) {
            Some(word) => Err(self.error(format!("{}= has no value", super::short(&word.key)))),
            None => Ok(()),
        }
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
    let mut walk = Walk { read, gaps, stack: vec![file.to_owned()], includes: 0, bytes: 0, all: vec![] };
    walk.file(text)?;
    Ok(walk.all)
}

/// The way through a file and what it includes.
struct Walk<'a, 'b> {
    read: Read<'a>,
    gaps: &'b mut Vec<String>,
    /// The file that is read now, last, and those that include it.
    stack: Vec<String>,
    includes: usize,
    bytes: usize,
    all: Vec<Entry>,
}

impl Walk<'_, '_> {
    fn file(&mut self, text: &str) -> Result<(), ConfError> {
        let file = self.stack.last().cloned().unwrap_or_default();
        self.bytes = self.bytes.saturating_add(text.len());
        if self.bytes > MAX_TEXT {
            return Err(ConfError::new(&file, 0, format!("with its includes longer than {MAX_TEXT} bytes")));
        }
        for (line, content) in logical_lines(&file, text)? {
            if let Some(mark) = template(&content) {
                let reason = format!("{mark} is an unrendered template: give the file that Slurm reads");
                return Err(ConfError::new(&file, line, reason));
            }
            if let Some(path) = include(&content) {
                self.include(&file, line, path)?;
                continue;
            }
            let words = words(&content).map_err(|reason| ConfError::new(&file, line, reason))?;
            self.all.push(Entry { file: file.clone(), line, words });
        }
        Ok(())
    }

    fn include(&mut self, file: &str, line: usize, path: &str) -> Result<(), ConfError> {
        let at = |reason: String| Err(ConfError::new(file, line, format!("Include {}: {reason}", super::short(path))));
        if self.stack.iter().any(|f| f == path) {
            return at("it includes itself".into());
        }
        if self.stack.len() > MAX_DEPTH {
            return at(format!("more than {MAX_DEPTH} files deep"));
        }
        self.includes += 1;
        if self.includes > MAX_INCLUDES {
            return at(format!("more than {MAX_INCLUDES} includes"));
        }
        match (self.read)(path) {
            Ok(text) => {
                self.stack.push(path.to_owned());
                self.file(&text)?;
                self.stack.pop();
            }
            Err(why) => self.gaps.push(format!("{file}:{line}: Include {}: {why}", super::short(path))),
        }
        Ok(())
    }
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
        let bare = uncomment(raw).trim_end();
        // An odd number of backslashes: the last one joins the lines.
        if bare.bytes().rev().take_while(|b| *b == b'\\').count() % 2 == 1 {
            content.push_str(bare.get(..bare.len() - 1).unwrap_or_default());
            open = Some((first, content));
            continue;
        }
        content.push_str(bare);
        push(&mut all, first, &content);
    }
    if let Some((first, content)) = open {
        push(&mut all, first, &content);
    }
    Ok(all)
}

fn push(all: &mut Vec<(usize, String)>, line: usize, content: &str) {
    let content = unescape(content.trim());
    if !content.is_empty() {
        all.push((line, content));
    }
}

/// A line up to its `#`, unless that is written `\#`. As in Slurm, quotes do not protect it.
fn uncomment(raw: &str) -> &str {
    let mut escaped = false;
    for (at, c) in raw.char_indices() {
        if c == '#' && !escaped {
            return raw.get(..at).unwrap_or(raw);
        }
        escaped = c == '\\' && !escaped;
    }
    raw
}

/// A backslash stands for the character after it.
fn unescape(content: &str) -> String {
    let mut chars = content.chars();
    let mut out = String::with_capacity(content.len());
    while let Some(c) = chars.next() {
        match c {
            '\\' => out.extend(chars.next()),
            _ => out.push(c),
        }
    }
    out
}

/// The mark of a template language that nobody has rendered.
pub(super) fn template(content: &str) -> Option<&str> {
    for mark in ["{{", "{%", "<%", "${", "$("] {
        if let Some(at) = content.find(mark) {
            let rest = content.get(at..).unwrap_or_default();
            return rest.get(..rest.char_indices().nth(24).map_or(rest.len(), |(i, _)| i));
        }
    }
    // `{name}`, `@name@` or `<name>` where a value, or a whole line, should be.
    content.split(['=', ' ', '\t', '/', ',', '"']).find(|v| {
        [('{', '}'), ('@', '@'), ('<', '>')].into_iter().any(|(open, close)| {
            let name = v.strip_prefix(open).and_then(|v| v.strip_suffix(close));
            name.is_some_and(|n| {
                !n.is_empty() && n.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
            })
        })
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
        let key = key.strip_suffix(['+', '-', '*', '/']).unwrap_or(key);
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
        // A comment does not go on; blanks after the backslash, and an escaped sign before it, do not matter.
        let text = "# c \\\nA=a\\#b \\ \nB=1\nC=x\\\\\nD+=3";
        let want = [(2, "A=a#b B=1"), (4, "C=x\\"), (5, "D=3")];
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
            ("P=\"/x/{dir}\"\n", 1, "template"),
            ("N=@NODES@\n", 1, "template"),
            ("M=1\nN=<your-host>\n", 2, "template"),
            ("N=$(hostname)\n", 1, "template"),
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
        // Not deep, but 30 to the power of 7.
        let mut wide = |path: &str| Ok(format!("Include {path}x\n").repeat(if path.len() < 8 { 30 } else { 0 }));
        assert!(entries("f", "Include x\n", &mut wide, &mut gaps).unwrap_err().reason.contains("includes"));
    }
}
