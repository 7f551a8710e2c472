//! topology.conf: what is read has passed its check.
#![no_main]

use pliant_model::conf::topology_conf;
use pliant_model::hostlist::MAX_NAMES;

libfuzzer_sys::fuzz_target!(|text: &str| {
    match topology_conf::parse("f", text, &mut |_| Err("not there".to_owned())) {
        Err(e) => assert!(e.line <= text.lines().count() + 1 && !e.reason.contains('\n'), "{e}"),
        Ok(tree) => {
            assert!(tree.check().is_ok() && tree.node_count() <= MAX_NAMES);
            assert_eq!(tree.paths().len(), tree.node_count());
        }
    }
});
