use super::*;
use crate::seed_summary::SeedSummary;

fn build_curve(label: &str, points: &[(f64, [f64; 3])]) -> FigureCurve {
    let make_cell = |(x, seeds): &(f64, [f64; 3])| CurveCell {
        x: *x,
        seeds: seeds.to_vec(),
        spread: SeedSummary::from_values(seeds).unwrap(),
    };
    FigureCurve { label: label.into(), cells: points.iter().map(make_cell).collect(), published: Vec::new() }
}

/// Returns a table with two panels. In the first panel, curve `b` is 1.5 to 2 times as high as curve `a`.
fn build_two_panel_table() -> FigureTable {
    let first_panel_curves = vec![
        build_curve("a", &[(1.0, [2.0, 1.9, 2.1]), (2.0, [4.0, 4.0, 4.0]), (3.0, [8.0, 7.0, 9.0])]),
        build_curve("b", &[(1.0, [4.0, 4.0, 4.0]), (2.0, [6.0, 6.0, 6.0]), (3.0, [16.0, 16.0, 16.0])]),
        build_curve("c", &[(1.0, [3.0, 3.0, 3.0]), (2.0, [5.0, 5.0, 5.0]), (3.0, [7.0, 7.0, 7.0])]),
    ];
    let second_panel_curves = vec![build_curve("a", &[(1.0, [1.0; 3])]), build_curve("b", &[(1.0, [5.0; 3])])];
    let make_panel = |title: &str, curves| PanelTable { title: title.into(), curves };
    FigureTable { seeds: 3, panels: vec![make_panel("p", first_panel_curves), make_panel("q", second_panel_curves)] }
}

fn judge_claim(claim: &str) -> ClaimVerdict {
    let assertion: Assertion = toml::from_str(&format!("statement = \"s\"\n{claim}")).unwrap();
    assertion.evaluate(&build_two_panel_table())
}

#[test]
fn claim_is_judged_by_the_median() {
    let verdict = judge_claim("value = { series = \"a\", panel = \"p\", at = 3 }\nat_most = 8.5\npublished = 8.2");
    assert!(verdict.holds);
    assert_eq!((verdict.measured, verdict.seeds), (Some((8.0, 8.0)), Some((7.0, 9.0))));
    assert_eq!(
        verdict.format_numbers(),
        "8.000 here (single seeds 7.000 to 9.000); required at most 8.5; published 8.2"
    );
    let verdict = judge_claim("value = { series = \"a\", panel = \"p\", at = 3 }\nat_least = 8.5");
    assert!(!verdict.holds);
    assert_eq!(verdict.verdict_text(), "does not hold here");
}

#[test]
fn bounds_apply_to_all_points_or_reduced_value() {
    let judge_ratio = |bounds: &str, reduction_toml: &str| {
        judge_claim(&format!(
            "ratio = {{ of = {{ series = \"b\", panel = \"p\" }}, to = {{ series = \"a\", panel = \"p\" \
             }}{reduction_toml} }}\n{bounds}"
        ))
    };
    let verdict = judge_ratio("at_least = 1.6", "");
    assert_eq!((verdict.holds, verdict.measured, verdict.points), (false, Some((1.5, 2.0)), 3));
    assert!(judge_ratio("at_least = 1.4\nat_most = 2.0", "").holds);
    assert!(judge_ratio("at_least = 1.6", ", take = \"greatest\"").holds);
    assert!(!judge_ratio("at_least = 1.6", ", take = \"least\"").holds);
}

#[test]
fn claim_can_cover_a_part_of_the_x_axis() {
    let verdict =
        judge_claim("value = { series = \"a\", panel = \"p\", from = 2, to = 3, take = \"mean\" }\nat_most = 6");
    assert_eq!((verdict.holds, verdict.measured), (true, Some((6.0, 6.0))));
}

#[test]
fn claim_without_a_panel_covers_all_panels() {
    let verdict = judge_claim("ratio = { of = { series = \"b\" }, to = { series = \"a\" } }\nat_most = 5");
    assert_eq!((verdict.holds, verdict.measured, verdict.points), (true, Some((1.5, 5.0)), 4));
}

#[test]
fn least_or_greatest_series_is_selected_at_each_point() {
    let verdict = judge_claim("value = { least_of = [\"a\", \"c\"], panel = \"p\" }\nat_most = 7");
    assert_eq!((verdict.holds, verdict.measured), (true, Some((2.0, 7.0))));
    let verdict = judge_claim("value = { greatest_of = [\"a\", \"c\"], panel = \"p\", at = 3 }\nat_most = 7.5");
    assert_eq!((verdict.holds, verdict.measured), (false, Some((8.0, 8.0))));
}

#[test]
fn x_where_a_curve_reaches_a_value_is_interpolated() {
    let claim = "value = { series = \"a\", panel = \"p\", reaches = 5 }\nat_least = 2.2\nat_most = 2.3";
    let verdict = judge_claim(claim);
    assert_eq!((verdict.holds, verdict.measured), (true, Some((2.25, 2.25))));
    let unreached_verdict = judge_claim(&claim.replace("= 5", "= 50"));
    assert_eq!((unreached_verdict.holds, unreached_verdict.measured), (false, None));
    assert!(
        unreached_verdict.format_numbers().starts_with("not reached here"),
        "{}",
        unreached_verdict.format_numbers()
    );
}

#[test]
fn ratio_can_be_divided_by_a_second_ratio() {
    let format_ratio_toml = |x: u8| {
        format!(
            "of = {{ series = \"b\", panel = \"p\", at = {x} }}, to = {{ series = \"a\", panel = \"p\", at = {x} }}"
        )
    };
    let verdict = judge_claim(&format!(
        "ratio = {{ {}, than = {{ {} }} }}\nat_least = 1.3",
        format_ratio_toml(3),
        format_ratio_toml(2)
    ));
    assert_eq!((verdict.holds, verdict.measured), (true, Some((2.0 / 1.5, 2.0 / 1.5))));
}

#[test]
fn ascending_order_fails_where_two_curves_cross() {
    assert!(judge_claim("ascending = { series = [\"a\", \"c\", \"b\"], panel = \"p\", to = 2 }").holds);
    let verdict = judge_claim("ascending = { series = [\"a\", \"c\", \"b\"], panel = \"p\" }");
    assert!(!verdict.holds);
    assert_eq!(verdict.measured.unwrap().0, 7.0 / 8.0);
    assert_eq!(verdict.bound, "each over the one before, a <= c <= b: at least 1");
}

#[test]
fn assertion_about_a_missing_curve_fails() {
    let verdict = judge_claim("value = { series = \"absent\", panel = \"p\" }\nat_least = 0");
    assert_eq!((verdict.holds, verdict.measured), (false, None));
}

#[test]
fn values_with_nan_or_infinity_have_no_minimum_and_maximum() {
    assert_eq!(min_and_max(&[2.0, 0.5, 1.0]), Some((0.5, 2.0)));
    assert_eq!(min_and_max(&[]), None);
    assert_eq!(min_and_max(&[1.0, f64::NAN]), None);
    assert_eq!(min_and_max(&[1.0, f64::INFINITY]), None);
}
