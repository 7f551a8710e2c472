//! slurm.conf, with an include that holds the text again.
#![no_main]

use pliant_model::conf::slurm_conf;
use pliant_model::hostlist::MAX_NAMES;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let mut read = |path: &str| if path == "same" { Ok(text.to_owned()) } else { Err("not there".to_owned()) };
    match slurm_conf::parse("f", text, &mut read) {
        Err(e) => assert!(e.line <= text.lines().count() + 1 && !e.reason.contains('\n'), "{e}"),
        Ok(conf) => {
            assert!(conf.node_names().len() <= MAX_NAMES);
            let _ = (conf.gpus(), conf.unknown_nodes(), conf.controllers(), conf.accounting_tres(), conf.cons_tres());
            for node in &conf.nodes {
                let _ = node.layout();
            }
            for partition in &conf.partitions {
                let _ = partition.max_time();
            }
        }
    }
});
