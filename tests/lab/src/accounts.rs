//! MariaDB, slurmdbd and the accounts in it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::services::environment;
use crate::spec::{ACCOUNT, LAB_USERS, PLIANT_USER, Spec};

/// The options that the template and the server share.
const INNODB: [&str; 4] = [
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=16M",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-lock-wait-timeout=900",
];

/// Name of slurmdbd's database.
pub(crate) const DATABASE: &str = "slurm_acct_db";

/// The server's command line. No network and no passwords: the socket's directory is closed to everybody but slurm.
pub(crate) fn mariadbd(spec: &Spec) -> Vec<String> {
    let dir = spec.dir.display();
    let mut argv: Vec<String> = vec![
        "mariadbd".into(),
        "--no-defaults".into(),
        "--user=root".into(),
        format!("--datadir={dir}/mysql/data"),
        format!("--socket={dir}/mysql/mysql.sock"),
        format!("--pid-file={dir}/mysql/mariadbd.pid"),
        format!("--log-error={dir}/log/mariadbd.log"),
        "--skip-networking".into(),
        "--skip-grant-tables".into(),
    ];
    argv.extend(INNODB.map(String::from));
    argv
}

/// Where the template of the data directory is, and whether the lab's copy has accounts already.
#[derive(Debug)]
pub(crate) struct Prepared {
    template: Option<PathBuf>,
    /// The data directory was copied from a template: tables, cluster and accounts are in it.
    pub(crate) filled: bool,
}

/// Puts a data directory in place: a copy of the template if there is one for these versions, else an empty one, which
/// costs some seconds more (`sacctmgr` takes half a second per command).
pub(crate) fn prepare(spec: &Spec) -> Result<Prepared> {
    let data = spec.path("mysql/data");
    let template = match cache_dir() {
        Some(dir) => {
            Some(dir.join(format!("accounts-1-{}-{}", version("mariadbd", "--version")?, version("slurmctld", "-V")?)))
        }
        None => None,
    };
    if let Some(dir) = template.as_deref().filter(|dir| dir.is_dir()) {
        copy(dir, &data)?;
        return Ok(Prepared { template, filled: true });
    }
    install(&data)?;
    // A directory is a database to MariaDB. slurmdbd would create it by itself, but with libmariadb 11.8.9 (Debian 13)
    // its second attempt to connect, after "unknown database", has lost its options and every query fails.
    let database = data.join(DATABASE);
    fs::create_dir(&database).with_context(|| format!("cannot create {}", database.display()))?;
    Ok(Prepared { template, filled: false })
}

/// Keeps a data directory whose server has ended cleanly as the template for later labs.
pub(crate) fn keep(spec: &Spec, prepared: &Prepared) -> Result<()> {
    let Some(template) = &prepared.template else {
        return Ok(());
    };
    let new = template.with_extension(format!("new-{}", std::process::id()));
    copy(&spec.path("mysql/data"), &new)?;
    // Another lab may have been faster; its template serves as well.
    if fs::rename(&new, template).is_err() {
        let _ = fs::remove_dir_all(&new);
    }
    Ok(())
}

/// The version that a program prints, fit for a file name.
fn version(program: &str, flag: &str) -> Result<String> {
    let out = Command::new(program)
        .arg(flag)
        .env("PATH", crate::services::SYSTEM_PATH)
        .output()
        .with_context(|| format!("--accounting: cannot run {program} (packages slurmctld, mariadb-server)"))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let word = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    let clean = |c: char| {
        if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }
    };
    Ok(word.or(text.split_whitespace().last()).unwrap_or("unknown").chars().map(clean).collect())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let out = Command::new("cp")
        .args(["-a", "--reflink=auto", "--sparse=always", "-T"])
        .args([from, to])
        .output()
        .context("cannot run cp")?;
    if !out.status.success() {
        bail!("cp {}: {}", from.display(), String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}

/// The checkout's `.cache`, else the user's; nothing where neither can be written.
fn cache_dir() -> Option<PathBuf> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map(|root| root.join(".cache"));
    let xdg = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    [checkout, xdg, home]
        .into_iter()
        .flatten()
        .map(|dir| dir.join("pliant-lab"))
        .find(|dir| fs::create_dir_all(dir).is_ok())
}

fn install(data: &Path) -> Result<()> {
    let out = Command::new("mariadb-install-db")
        .args(["--no-defaults", "--user=root", "--skip-test-db", "--auth-root-authentication-method=normal"])
        .arg(format!("--datadir={}", data.display()))
        .args(INNODB)
        .env("PATH", crate::services::SYSTEM_PATH)
        .stdin(Stdio::null())
        .output()
        .context("--accounting: cannot run mariadb-install-db (package mariadb-server)")?;
    if !out.status.success() {
        bail!("mariadb-install-db: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}

/// Registers the cluster, the account and the users; `pliant` becomes an operator.
pub(crate) fn register(spec: &Spec) -> Result<()> {
    let script = format!(
        "add cluster lab\nadd account {ACCOUNT}\nadd user {},root account={ACCOUNT}\n\
         add user {PLIANT_USER} account={ACCOUNT} adminlevel=Operator\nquit\n",
        LAB_USERS.join(","),
    );
    let mut cmd = Command::new("timeout");
    cmd.args(["--kill-after=2", "60", "sacctmgr", "-i", "-Q"]);
    environment(spec, &mut cmd);
    cmd.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = cmd.spawn().context("cannot run sacctmgr")?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(script.as_bytes()).context("sacctmgr went away")?;
    }
    let out = child.wait_with_output().context("sacctmgr")?;
    let err = String::from_utf8_lossy(&out.stderr);
    if !out.status.success() || !err.trim().is_empty() {
        bail!("sacctmgr: {} {}", err.trim(), String::from_utf8_lossy(&out.stdout).trim());
    }
    Ok(())
}
