//! Misconfigurations of the controller's host.

use std::fs;
use std::path::Path;

use coreward_testbed::fleet::first_controller_address;

use super::{CheckedHost, DoctorTestConditions, DoctorTestEnv};
use crate::mounted_disk::MountedDisk;

pub fn check_controller_settings(env: &DoctorTestEnv, controller: &CheckedHost) {
    let store_path = env.testbed.directory().join("controller.redb");
    let make_readable_command = format!("chmod 644 {}", store_path.display());
    env.run_script(&controller.namespace, &make_readable_command);
    controller.assert_fault_fixed(env, "store", &make_readable_command, DoctorTestConditions::Normal);
    controller.assert_no_new_finding(env, &make_readable_command);
    let missing_store_path = store_path.with_file_name("no/controller.redb");
    let host_with_missing_store = controller
        .with_replaced_config_text(&[(store_path.to_str().unwrap(), missing_store_path.to_str().unwrap())], "");
    let missing_directory = "no directory for the store";
    host_with_missing_store.assert_only_new_finding(env, missing_directory, "store", DoctorTestConditions::Normal, &[]);
    check_store_on_another_disk(env, controller, &store_path);
    let host_with_wrong_address =
        controller.with_replaced_config_text(&[(&first_controller_address(), "192.0.2.1:7400")], "");
    host_with_wrong_address.assert_only_new_finding(
        env,
        "an address of another machine",
        "listen",
        DoctorTestConditions::Normal,
        &[],
    );
}

fn check_store_on_another_disk(env: &DoctorTestEnv, controller: &CheckedHost, store: &Path) {
    let mounted_disk = MountedDisk::mount(env.testbed.directory().join("doctor-disk"));
    let store_on_disk = mounted_disk.0.join("controller.redb");
    fs::copy(store, &store_on_disk).unwrap();
    let host_with_store_on_disk =
        controller.with_replaced_config_text(&[(store.to_str().unwrap(), store_on_disk.to_str().unwrap())], "");
    host_with_store_on_disk.assert_no_new_finding(env, "a store on another disk");
    let filler_path = mounted_disk.0.join("fill");
    let fill_disk_command = format!("cat /dev/zero > {0} 2> /dev/null || test -s {0}", filler_path.display());
    host_with_store_on_disk.assert_fault_detected(
        env,
        "store",
        &fill_disk_command,
        &format!("rm {}", filler_path.display()),
    );
    let build_remount_command = |mode: &str| format!("mount -o remount,{mode} {}", mounted_disk.0.display());
    host_with_store_on_disk.assert_fault_detected(
        env,
        "store",
        &build_remount_command("ro"),
        &build_remount_command("rw"),
    );
}
