//! Knot DNS, as Debian has it, with `coreward dispatch` before it: every query is answered, whatever chooses the worker.

use std::path::Path;

use clap::Parser as _;
use coreward_testbed::skip_without_privilege;
use coreward_testbed::stock_server::{StockServerArgs, compare, knot};

#[derive(clap::Parser)]
struct Cli {
    #[command(flatten)]
    args: StockServerArgs,
}

#[test]
fn a_stock_server_answers_every_query_that_is_dispatched() -> anyhow::Result<()> {
    let test = "a_stock_server_answers_every_query_that_is_dispatched";
    if skip_without_privilege(test) {
        return Ok(());
    }
    if !Path::new(knot::PROGRAM).exists() {
        println!("SKIPPED {test}: {} is missing (Debian package knot)", knot::PROGRAM);
        return Ok(());
    }
    let options = ["--policies", "kernel,rr,jsq", "--workers", "3", "--rate", "300", "--seconds", "1", "--runs", "1"];
    let compared = compare(&Cli::parse_from(["test"].iter().chain(&options)).args)?;
    assert_eq!(compared.policies.len(), 3);
    for measured in &compared.policies {
        assert_eq!(measured.lost, 0, "{measured:?}");
        // Poisson: 300 with a standard deviation of 17.
        assert!((200.0..400.0).contains(&measured.answered_rps.median), "{measured:?}");
    }
    Ok(())
}
