//! gres.conf of this node, with the minors of the files that it names.

use super::identity::Named;
use pliant_model::NodeName;
use pliant_model::conf::{gres_conf, slurm_conf};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

/// The largest file that is read, in bytes.
const MAX: u64 = 16 << 20;

/// The folder of Slurm's configuration: that of the slurm.conf that is set, of `SLURM_CONF`, or the usual ones
/// (configless slurmd keeps its copy in /run/slurm/conf).
pub fn folder(conf: &Path) -> Option<PathBuf> {
    let set = Some(conf.to_owned()).filter(|c| !c.as_os_str().is_empty());
    let set = set.or_else(|| std::env::var_os("SLURM_CONF").map(PathBuf::from));
    if let Some(file) = set {
        return file.parent().map(Path::to_owned);
    }
    let usual = ["/etc/slurm", "/etc/slurm-llnl", "/run/slurm/conf", "/var/spool/slurmd/conf-cache"];
    usual.iter().map(PathBuf::from).find(|d| d.join("slurm.conf").exists())
}

fn read(path: &Path) -> Result<String, String> {
    let length = std::fs::metadata(path).map_err(|e| e.to_string())?.len();
    if length > MAX {
        return Err(format!("{length} bytes: too large"));
    }
    std::fs::read_to_string(path).map_err(|e| e.to_string())
}

/// What gres.conf names for a node.
pub fn named(folder: Option<&Path>, node: &NodeName) -> Named {
    let problem = |text: String| Named { problems: vec![text], ..Named::default() };
    let Some(folder) = folder else {
        return problem("no slurm.conf found: GRES indexes are not known".into());
    };
    let path = folder.join("gres.conf");
    let text = match read(&path) {
        Ok(text) => text,
        Err(why) => return problem(format!("{}: {why}: GRES indexes are not known", path.display())),
    };
    let mut include = |file: &str| read(&folder.join(file));
    let conf = match gres_conf::parse(&path.to_string_lossy(), &text, &mut include) {
        Ok(conf) => conf,
        Err(e) => return problem(e.to_string()),
    };
    // Slurm numbers GPUs by the order of types in slurm.conf; without it that of gres.conf has to do.
    let slurm = read(&folder.join("slurm.conf")).ok();
    let slurm = slurm.and_then(|t| slurm_conf::parse("slurm.conf", &t, &mut |f| read(&folder.join(f))).ok());
    let gres = slurm.as_ref().and_then(|s| s.node_line(node)).and_then(|l| l.gres());
    let devices = gres.map_or_else(|| conf.gpus(node), |gres| conf.merged(node, gres));
    let minors = devices.iter().map(|d| minor(d.file.as_deref()?)).collect();
    let auto_detect = conf.auto_detect_of(node).is_some();
    Named { devices, minors, auto_detect, problems: conf.gaps }
}

/// The minor of a device file; where the file is not there, the number that its name ends in.
fn minor(file: &str) -> Option<u32> {
    use std::os::unix::fs::MetadataExt as _;
    match std::fs::metadata(file) {
        Ok(meta) if meta.file_type().is_char_device() => Some(rustix::fs::minor(meta.rdev())),
        _ => {
            let digits = file.bytes().rev().take_while(u8::is_ascii_digit).count();
            file.get(file.len() - digits..).filter(|d| !d.is_empty())?.parse().ok()
        }
    }
}
