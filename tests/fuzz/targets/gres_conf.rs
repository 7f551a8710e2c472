//! gres.conf, with an include that holds the text again.
#![no_main]

use pliant_model::conf::{MAX_TOTAL, gres_conf};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let mut read = |path: &str| if path == "same" { Ok(text.to_owned()) } else { Err("not there".to_owned()) };
    match gres_conf::parse("f", text, &mut read) {
        Err(e) => assert!(e.line <= text.lines().count() + 1 && !e.reason.contains('\n'), "{e}"),
        Ok(conf) => {
            assert!(conf.lines.iter().map(|l| l.files.len()).sum::<usize>() <= MAX_TOTAL);
            let total = conf.total();
            if let Some(node) = conf.nodes().first() {
                assert!(conf.gpus(node).len() <= total);
                let _ = (conf.merged(node, "gpu:a40:2"), conf.shards_per_gpu(node), conf.auto_detect_of(node));
            }
        }
    }
});
