//! Against a real munged of its own, in a directory of its own.
#![allow(clippy::unwrap_used)]

use pliant_munge::{MungeError, decode, encode};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Munged {
    child: Child,
    dir: PathBuf,
    socket: PathBuf,
}

impl Munged {
    /// `None` where munged is not installed.
    fn start(name: &str) -> Option<Munged> {
        let program = ["/usr/sbin/munged", "/usr/local/sbin/munged"].into_iter().find(|p| Path::new(p).exists())?;
        let dir = std::env::temp_dir().join(format!("pliant-munge-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let key = dir.join("key");
        std::fs::write(&key, [7u8; 128]).unwrap();
        let mode = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o600);
        std::fs::set_permissions(&key, mode).unwrap();
        let socket = dir.join("socket");
        let option = |name: &str, file: &str| format!("--{name}={}", dir.join(file).display());
        let child = Command::new(program)
            .args(["--foreground", "--force", "--num-threads=2"])
            .args([option("key-file", "key"), option("socket", "socket"), option("pid-file", "pid")])
            .args([option("log-file", "log"), option("seed-file", "seed")])
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let munged = Munged { child, dir, socket };
        let until = Instant::now() + Duration::from_secs(10);
        while encode(Some(&munged.socket), b"", None, 1).is_err() {
            assert!(Instant::now() < until, "munged did not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(munged)
    }
}

impl Drop for Munged {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn own_uid() -> u32 {
    std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap())
}

#[test]
fn credentials_are_what_they_say() {
    let Some(munged) = Munged::start("basic") else {
        return eprintln!("munged is not installed: skipped");
    };
    let socket = Some(munged.socket.as_path());
    let payload = b"any\0bytes\xff";
    let credential = encode(socket, payload, Some(own_uid()), 30).unwrap();
    let decoded = decode(socket, &credential).unwrap();
    assert_eq!((decoded.uid, decoded.payload.as_slice(), decoded.ttl), (own_uid(), payload.as_slice(), 30));
    assert!((0..=2).contains(&(decoded.decode_time - decoded.encode_time)));
    assert!(decoded.encode_time > 1_700_000_000);

    assert!(matches!(decode(socket, &credential), Err(MungeError::Replayed(_))), "decoded a second time");

    let other = encode(socket, b"x", Some(own_uid() + 12345), 30).unwrap();
    assert!(matches!(decode(socket, &other), Err(MungeError::Unauthorized(_))), "for another uid");

    let mut altered = encode(socket, b"x", None, 30).unwrap();
    let at = altered.len() / 2;
    let digit = if altered.as_bytes()[at] == b'A' { "B" } else { "A" };
    altered.replace_range(at..=at, digit);
    assert!(decode(socket, &altered).is_err(), "altered");
    assert!(decode(socket, "MUNGE:not base64!:").is_err());

    let short = encode(socket, b"x", None, 1).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    assert!(matches!(decode(socket, &short), Err(MungeError::Expired(_))), "expired");
    assert_eq!(decode(socket, &encode(socket, b"", None, 5).unwrap()).unwrap().payload, b"");
}
