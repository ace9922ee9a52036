//! The command line of `coreward-lab demo`.

use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::PossibleValuesParser;
use coreward_model::policy;

use super::timeline::MIN_RUN_SECONDS;
use crate::network_options::TestbedNetworkOptions;

/// Names of the policies that the demo compares by default: those in Fig. 2a of CrossRSS (Barbette et al., CoNEXT'20),
/// and coreward's own.
const DEFAULT_COMPARED_POLICY_NAMES: [&str; 5] = ["hash", "rr", "pow2", "crossrss", "crossrss-plus"];

/// Options of `coreward-lab demo`.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoOptions {
    /// Length of each seed's run (s)
    #[arg(long, default_value_t = 38, value_parser = clap::value_parser!(u64).range(MIN_RUN_SECONDS..=3600))]
    pub seconds: u64,
    /// Number of servers in the pool at the start; another server joins later
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=32))]
    pub servers: u16,
    /// Number of emulated cores of each server
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=32))]
    pub cores: u16,
    /// Policies to compare in the same run, separated by commas
    #[arg(long = "policy", value_name = "NAME", value_delimiter = ',',
        value_parser = PossibleValuesParser::new(policy::policy_names()),
        default_values_t = DEFAULT_COMPARED_POLICY_NAMES.map(String::from))]
    pub requested_policies: Vec<String>,
    /// Seeds of the arrival logs, run one after the other, separated by commas
    #[arg(long, value_name = "SEED", value_delimiter = ',', num_args = 1.., default_values_t = [1, 2, 3, 4, 5])]
    pub seeds: Vec<u64>,
    /// Trigger of new tables: once per report interval, as in the simulator, or when their inputs change
    #[arg(long, value_enum, default_value_t = TableTrigger::Interval)]
    pub tables: TableTrigger,
    #[command(flatten)]
    pub network: TestbedNetworkOptions,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = DemoOutputFormat::Text)]
    pub format: DemoOutputFormat,
    /// Only replay the arrival logs in the simulator: no testbed, no root
    #[arg(long, conflicts_with = "format")]
    pub simulated: bool,
    /// Directory for the picture, the JSON and the arrival logs
    #[arg(long, value_name = "DIR", default_value = "out")]
    pub out: PathBuf,
}

/// Condition on which the controller makes new tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TableTrigger {
    /// The controller makes tables once per report interval.
    Interval,
    /// The controller makes tables whenever their inputs change.
    OnChange,
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoOutputFormat {
    /// Text with tables for people.
    Text,
    /// One JSON object.
    Json,
}

impl DemoOptions {
    /// Returns the names of the policies to run, without duplicates, in the order of the model's list.
    pub fn selected_policies(&self) -> Vec<&'static str> {
        let is_requested =
            |name: &&str| self.requested_policies.iter().any(|requested_policy| requested_policy == name);
        policy::policy_names().into_iter().filter(is_requested).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct DemoTestCommand {
        #[command(flatten)]
        options: DemoOptions,
    }

    fn parse_demo_options(line: &str) -> Result<DemoOptions, String> {
        let arguments = std::iter::once("demo").chain(line.split_whitespace());
        DemoTestCommand::try_parse_from(arguments).map(|command| command.options).map_err(|error| error.to_string())
    }

    #[test]
    fn default_options_select_compared_policies_and_five_seeds() {
        let options = parse_demo_options("").unwrap();
        assert_eq!(options.selected_policies(), DEFAULT_COMPARED_POLICY_NAMES);
        assert_eq!((options.seeds, options.seconds), (vec![1, 2, 3, 4, 5], 38));
        let options = parse_demo_options("--policy crossrss,hash --policy hash --seeds 7,8").unwrap();
        assert_eq!((options.selected_policies(), options.seeds), (vec!["hash", "crossrss"], vec![7, 8]));
    }

    #[test]
    fn unsatisfiable_options_are_rejected() {
        for (line, expected_text) in [
            ("--policy crosrss", "crossrss-plus"),
            ("--seconds 17", "18..=3600"),
            ("--servers 0", "1..=32"),
            ("--seeds one", "one"),
            ("--seeds", "--seeds"),
            ("--forwarding vxlan", "[possible values: l2, ipip, gue]"),
            ("--family 5", "[possible values: 4, 6]"),
        ] {
            let error = parse_demo_options(line).unwrap_err();
            assert!(error.contains(expected_text), "{line}: {error}");
        }
    }
}
