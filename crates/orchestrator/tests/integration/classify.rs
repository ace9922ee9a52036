//! Classification of datagrams by service.

use coreward_orchestrator::classify::{Classifier, Pattern};

#[test]
fn first_match_counts() {
    let pattern = |offset, bytes: &[u8]| Some(Pattern { offset, bytes: bytes.to_vec() });
    let mut classifier = Classifier { rules: vec![(2, pattern(1, &[7])), (0, pattern(0, b"get "))] };
    let services =
        |classifier: &Classifier| [&b"get x"[..], b"g\x07", b"g", b""].map(|text| classifier.classify_request(text));
    assert_eq!(services(&classifier), [Some(0), Some(2), None, None]);
    classifier.rules.push((1, None));
    assert_eq!(services(&classifier), [Some(0), Some(2), Some(1), Some(1)]);
}
