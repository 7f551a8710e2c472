//! Names of users, by `getent`: it asks the same sources as Slurm does (files, LDAP, …) and is cached here.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Mutex;

static CACHE: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

/// The name of a uid, where the system knows one.
pub fn name(uid: u32) -> Option<String> {
    if let Some(known) = CACHE.lock().ok()?.get(&uid) {
        return Some(known.clone());
    }
    let name = passwd(&uid.to_string())?.0;
    CACHE.lock().ok()?.insert(uid, name.clone());
    Some(name)
}

fn passwd(key: &str) -> Option<(String, u32)> {
    let output = Command::new("getent").args(["passwd", key]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut fields = text.trim_end().split(':');
    Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
}
