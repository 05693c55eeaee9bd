// Every kernel of the cpu target.
#pragma once
#include "attention.h"
#include "elementwise.h"
#include "embed.h"
#include "heads.h"
#include "kernel.h"
#include "linear.h"
#include "mlp.h"
#include "norm.h"
#include "quantized_activation.h"
#include "rope.h"
