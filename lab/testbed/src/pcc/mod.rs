//! Measurement of connections that break while servers and load balancers come and go. It is Cheetah's Fig. 9 (NSDI'20,
//! Sect. 5.3) with the real controller, load balancers and agents, and with connections of stock kernels.
//!
//! Every method runs once per seed in a new testbed, with the same requests at the same times and the same changes of
//! the pool.
//!
//! * [`method`]: compared methods
//! * [`timeline`]: changes of the pool
//! * [`run`]: one run
//! * [`figure`]: `coreward-lab figure cheetah-9-live`

pub mod figure;
pub mod method;
pub mod run;
pub mod timeline;

use crate::interrupt_flag;
use crate::stream_connections::client::StreamWorkload;
use method::PccMethod;
use run::PccRun;

/// Options of `coreward-lab testbed pcc`.
#[derive(Debug, Clone, clap::Args)]
pub struct PccMeasurementArgs {
    /// Method by which packets find their server
    #[arg(long, value_parser = PccMethod::parse, default_value = "stateless")]
    method: PccMethod,
    #[command(flatten)]
    streams: StreamWorkload,
}

/// Measures one method and prints the results of each second as JSON. Fails without root, when a process does not
/// start, or when interrupted. Also removes the testbed if it fails.
pub fn main(args: &PccMeasurementArgs) -> anyhow::Result<()> {
    interrupt_flag::catch_signals()?;
    let pcc_run = PccRun::measure_run(args.method, &args.streams, &|| ())?;
    println!("{}", serde_json::to_string_pretty(&pcc_run)?);
    Ok(())
}
