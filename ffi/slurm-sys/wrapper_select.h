/* SPDX-License-Identifier: GPL-2.0-or-later
 * What bindgen reads for the select plugin: Slurm's internal headers, from the source tree that SLURM_SOURCE names.
 * slurm_xlator.h gives the functions the names (slurm_bit_test, ...) that libslurmfull has in every release.
 */
#include "config.h"
#include "src/common/slurm_xlator.h"
#include "slurm/slurm_version.h"
#include "slurm/slurm.h"
#if __has_include("src/interfaces/gres.h")
#include "src/interfaces/gres.h"
#else
#include "src/common/gres.h"
#endif
#include "src/slurmctld/slurmctld.h"

#ifdef JOB_MAGIC
static const unsigned int PLIANT_JOB_MAGIC = JOB_MAGIC;
static const unsigned int PLIANT_DETAILS_MAGIC = DETAILS_MAGIC;
#else
#error "slurmctld.h of this release has no JOB_MAGIC: the layout of job_record cannot be checked"
#endif
static const unsigned int PLIANT_SOURCE_VERSION = SLURM_VERSION_NUMBER;
