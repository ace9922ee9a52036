//! Broken connections while servers and load balancers come and go: Cheetah's Fig. 9 (NSDI'20, Sect. 5.3), measured
//! with the real controller, load balancers and agents, and connections of stock kernels.
//!
//! Every method has a run of its own for every seed, in a testbed of its own, with the same requests at the same
//! moments and the same changes of the pool.
//!
//! * [`method`]: what is compared
//! * [`timeline`]: what happens when
//! * [`run`]: one run
//! * [`figure`]: `coreward-lab figure cheetah-9-live`

pub mod figure;
pub mod method;
pub mod run;
pub mod timeline;

use crate::interrupt;
use crate::stream::client::Streams;
use method::Method;
use run::Run;

/// Options of `coreward-lab testbed pcc`.
#[derive(Debug, Clone, clap::Args)]
pub struct PccArgs {
    /// Method by which packets find their server
    #[arg(long, value_parser = Method::parse, default_value = "stateless")]
    method: Method,
    #[command(flatten)]
    streams: Streams,
}

/// Makes one run and prints what was seen, second by second, as JSON. Fails without root, when something does not
/// start, or when interrupted; nothing is left behind.
pub fn main(args: &PccArgs) -> anyhow::Result<()> {
    interrupt::catch()?;
    let run = Run::measure(args.method, &args.streams, &|| ())?;
    println!("{}", serde_json::to_string_pretty(&run)?);
    Ok(())
}
