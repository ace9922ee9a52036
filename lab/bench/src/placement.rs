//! Command `coreward-lab bench placement`, which compares the policies on four workloads in virtual time. It also
//! compares weights of an assigned connection in `crossrss-plus`. Its table is part of docs/policies.md.

use comfy_table::Table;
use coreward_model::arrival_log::ConnectionWorkload;
use coreward_model::policy::{CrossRssPlusPolicy, PlacementPolicy, create_policy_by_name};
use coreward_model::replay::{ArrivalReplaySettings, ReplayPlacementMethod, replay_for_variances};
use coreward_model::statistics::median;

/// Options of `coreward-lab bench placement`.
#[derive(clap::Args)]
pub struct PlacementBenchArgs {
    /// Number of seeds; the runs use the seeds 1, 2, 3 and so on
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
}

fn compared_workloads() -> [(&'static str, ConnectionWorkload); 4] {
    let default_workload = ConnectionWorkload::default();
    let mice_heavy_workload = ConnectionWorkload {
        elephant_work_permille: 500,
        mouse_request_count_range: (1, 8),
        mouse_request_interval_us: 50_000,
        ..default_workload
    };
    let long_lived_workload = ConnectionWorkload {
        elephant_work_permille: 700,
        elephant_load_permille: 60,
        elephant_lifetime_range_us: (2_000_000, 20_000_000),
        mouse_request_count_range: (1, 4),
        mouse_request_interval_us: 30_000,
        ..default_workload
    };
    let short_request_workload = ConnectionWorkload {
        service_us: 2_000,
        mouse_request_count_range: (1, 10),
        mouse_request_interval_us: 20_000,
        ..default_workload
    };
    [
        ("demo", default_workload),
        ("more mice", mice_heavy_workload),
        ("long-lived", long_lived_workload),
        ("short requests", short_request_workload),
    ]
}

/// Name of a policy in the table, and the function that creates the policy from a seed. The function returns `None` for
/// the oracle.
type PlacementPolicyRow = (String, Box<dyn Fn(u64) -> Option<Box<dyn PlacementPolicy>>>);

fn policy_rows() -> Vec<PlacementPolicyRow> {
    let mut rows: Vec<PlacementPolicyRow> = Vec::new();
    for name in ["hash", "rr", "pow2", "crossrss", "crossrss-plus"] {
        rows.push((
            name.to_string(),
            Box::new(move |seed| Some(create_policy_by_name(name, seed).expect("a policy of the registry"))),
        ));
    }
    for share in [0.1, 0.25, 0.5, 1.0, 2.0] {
        let make_policy = move |seed| {
            Some(Box::new(CrossRssPlusPolicy::with_fixed_cost_fraction(seed, share)) as Box<dyn PlacementPolicy>)
        };
        rows.push((format!("crossrss-plus, counting {share}"), Box::new(make_policy)));
    }
    rows.push(("noise floor (perfect placement)".to_string(), Box::new(|_| None)));
    rows
}

/// Prints a table of the policies' per-core and per-server load variances (%), as medians over the seeds.
pub fn print_variance_table(args: &PlacementBenchArgs) {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    let workload_names = compared_workloads().map(|(name, _)| name.to_string());
    table.set_header(std::iter::once("core variance % / server variance %".to_string()).chain(workload_names));
    for (name, make_policy) in policy_rows() {
        let variance_cells = compared_workloads().map(|(_, workload)| {
            let variances: Vec<_> = (1..=args.seeds)
                .map(|seed| {
                    let mut policy = make_policy(seed);
                    let placement_method = policy
                        .as_mut()
                        .map_or(ReplayPlacementMethod::Oracle, |policy| ReplayPlacementMethod::Policy(policy.as_mut()));
                    replay_for_variances(
                        &workload.generate(seed),
                        ArrivalReplaySettings { seed, ..ArrivalReplaySettings::default() },
                        placement_method,
                    )
                })
                .collect();
            let core_variance_pct =
                median(&variances.iter().map(|variance| variance.across_cores_pct).collect::<Vec<_>>())
                    .unwrap_or_default();
            let server_variance_pct =
                median(&variances.iter().map(|variance| variance.across_servers_pct).collect::<Vec<_>>())
                    .unwrap_or_default();
            format!("{core_variance_pct:.2} / {server_variance_pct:.2}")
        });
        table.add_row(std::iter::once(name).chain(variance_cells));
    }
    println!("{table}");
}
